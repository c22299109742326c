"""The products of `products.py` on Hopper, in CUDA C++: two blocks share what both need, and one group only fetches."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triax.kernels import nvrtc
from triax.kernels.moe.rows import ExpertRows
from triax.kernels.routed import ExpertWeights

SOURCES = tuple(Path(__file__).with_name(name) for name in ("hopper.cuh", "hopper.cu"))
GATE_UP_PROJ, DOWN_PROJ, DOWN_PROJ_BACKWARD, GATE_UP_PROJ_BACKWARD, WEIGHT_GRADIENT = range(5)
ROWS, COLUMNS, DEPTH = 256, 256, 64
"""Rows and columns that a pair of blocks takes, and what is summed at a time."""
THREADS = 384
SHARED_BYTES = 1024 + 4 * 48 * 1024 + 32 * 1024
Defines = tuple[tuple[str, str | int], ...]


def is_available(device: torch.device) -> bool:
    """Say whether these kernels can be compiled for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and nvrtc.is_available()


def macros(
    kind: int, caps: tuple[float | None, float | None] = (None, None), *, keeps: bool = False, wide: bool = False,
    adds: bool = False,
) -> Defines:  # fmt: skip
    """Return what the source is compiled with.

    Args:
        kind: Which product.
        caps: Caps of the activation's gate and up, if any.
        keeps: Let `gate_up_proj` write the activation's arguments too.
        wide: Let `weight_gradient` write fp32.
        adds: Let `weight_gradient` add to what is there.
    """
    known = [("KIND", kind), ("KEEPS", int(keeps)), ("WIDE", int(wide)), ("ADDS", int(adds))]
    named = zip(("GATE_CAP", "UP_CAP"), caps, strict=True)
    return (*known, *((name, f"{float(cap)}f") for name, cap in named if cap is not None))


class HopperProducts:
    """The products of one call: rows of one choice, in tiles of 256, with one set of weights in bf16."""

    def __init__(self, rows: ExpertRows, weights: ExpertWeights, caps: tuple[float | None, float | None]) -> None:
        self.rows, self.weights, self.caps = rows, weights, caps
        self.num_experts, self.inner_dim, self.width = weights.gate.shape
        self.options = {"device": weights.gate.device, "dtype": torch.bfloat16}

    def gate_up_proj(self, x: Tensor, keeps: bool) -> tuple[Tensor, Tensor]:
        """Return the activation's two arguments, if kept, and its value times the shares."""
        both = torch.empty(2, len(x) if keeps else 0, self.inner_dim, **self.options)
        inner = torch.empty(len(x), self.inner_dim, **self.options)
        gate, up = (_map(weight, 128) for weight in self.weights[:2])
        out = _map(inner[None], 64)
        maps = [_map(x[None], 128), gate, up, out, out, _map(both, 64) if keeps else out]
        defines = macros(GATE_UP_PROJ, self.caps, keeps=keeps)
        self._launch(defines, maps, self.width, -(-self.inner_dim // (COLUMNS // 2)))
        return both, inner

    def down_proj(self, inner: Tensor) -> Tensor:
        """Return what the experts return of each row."""
        result = torch.empty(len(inner), self.width, **self.options)
        down, out = _map(self.weights.down, 128), _map(result[None], 64)
        maps = [_map(inner[None], 128), down, down, out, out, out]
        self._launch(macros(DOWN_PROJ), maps, self.inner_dim, -(-self.width // COLUMNS))
        return result

    def down_proj_backward(self, above: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of both arguments, shares times values, and parts of the gradients of the shares."""
        to_both, weighted = torch.empty_like(both), torch.empty(both.shape[1:], **self.options)
        wide = -(-self.inner_dim // COLUMNS)
        share_parts = torch.empty(wide, len(above), dtype=torch.float32, device=above.device)
        down = _map(self.weights.down, 64)
        maps = [_map(above[None], 128), down, down, _map(both, 128), _map(weighted[None], 64), _map(to_both, 64)]
        self._launch(macros(DOWN_PROJ_BACKWARD, self.caps), maps, self.width, wide, share_parts)
        return to_both, weighted, share_parts

    def gate_up_proj_backward(self, to_both: Tensor) -> Tensor:
        """Return the gradients of each row."""
        result = torch.empty(to_both.shape[1], self.width, **self.options)
        out = _map(result[None], 64)
        gate, up = (_map(weight, 64) for weight in self.weights[:2])
        maps = [_map(to_both, 128), gate, up, out, out, out]
        self._launch(macros(GATE_UP_PROJ_BACKWARD), maps, self.inner_dim, -(-self.width // COLUMNS))
        return result

    def weight_gradient(
        self, left: Tensor, part: int, right: Tensor, dtype: torch.dtype, total: Tensor | None
    ) -> Tensor | None:
        """Return each expert's left[part]^T right, or add it to a total and return nothing."""
        shape = self.num_experts, left.shape[2], right.shape[1]
        result = torch.empty(shape, device=right.device, dtype=dtype) if total is None else total
        other, out = _map(right[None], 64), _map(result, 64)
        maps = [_map(left[part : part + 1], 64), other, other, out, out, out]
        defines = macros(WEIGHT_GRADIENT, wide=result.dtype is torch.float32, adds=total is not None)
        self._launch(defines, maps, 0, -(-shape[2] // COLUMNS), None, -(-shape[1] // ROWS))
        return result if total is None else None

    def _launch(
        self, defines: Defines, maps: list[Any], depth: int, wide: int, share_parts: Tensor | None = None, tall: int = 0
    ) -> None:
        rows, device = self.rows, self.weights.gate.device
        index = torch.cuda.current_device() if device.index is None else device.index
        function = nvrtc.load(SOURCES, "experts_product", defines, SHARED_BYTES, index)
        most = wide * (tall * self.num_experts or len(rows.expert))
        pairs = min(most, _most_pairs(index))
        numbers = [ctypes.c_longlong(len(rows.share)), *map(ctypes.c_int, (depth, wide, tall, self.num_experts))]
        pointers = [rows.expert, rows.used, rows.first, rows.count, rows.share, share_parts]
        with torch.cuda.device(index):
            nvrtc.launch(function, (2 * pairs,), THREADS, SHARED_BYTES, [*maps, *pointers, *numbers])


@lru_cache
def _most_pairs(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count // 2


def _map(matrices: Tensor, high: int) -> Any:
    """Describe contiguous matrices to the copy engine, which moves `high` rows of 128 bytes at a time."""
    count, rows, columns = matrices.shape
    return _encoded(matrices.data_ptr(), count, rows, columns, matrices.itemsize, high)


@lru_cache(maxsize=4096)  # addresses recur, and encoding takes longer than all else on a launch's way
def _encoded(address: int, count: int, rows: int, columns: int, size: int, high: int) -> Any:
    driver = nvrtc.driver()
    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32 if size == 4 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    problem, encoded = driver.cuTensorMapEncodeTiled(
        kind, 3, address, [driver.cuuint64_t(n) for n in (columns, rows, count)],
        [driver.cuuint64_t(n * size) for n in (columns, rows * columns)],
        [driver.cuuint32_t(n) for n in (128 // size, high, 1)], [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    assert not int(problem), f"{count} matrices of {rows} by {columns} at {address:#x} have no map: {problem}"
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(encoded.getPtr(), 128))
