"""Work items of routed experts with MXFP4 weights on Hopper: what both kernels need before and after they multiply."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.kernels import nvrtc
from triax.kernels.mx.mxfp4 import Mxfp4

PLAN, WEIGHTS = (Path(__file__).with_name(name) for name in ("work_plan.cu", "weights.cuh"))
THREADS = 1024
MOST_EXPERTS = 4096
WIDTHS = 128  # what the widths of the matrices split into
SLOT = 2048 + 128  # bytes of a chunk of a warp's weights, with their scales
ROOM = 227 * 1024  # bytes of shared memory that a block may have
RINGS = (4, 3, 2, 1)
Defines = tuple[tuple[str, int], ...]


class WorkPlan(NamedTuple):
    """Pairs of token and expert, sorted by expert and cut into items."""

    order: Int[Tensor, " P"]
    """Pairs, those of an expert side by side."""
    item: Int[Tensor, "items 4"]
    """Expert, first place in the order, and number of pairs of every item."""
    count: Int[Tensor, " one"]
    """How many items there are."""


class Shape(NamedTuple):
    """What the kernels are compiled for."""

    width: int
    """Numbers of a token, which a row of the matrices meets."""
    rows: int
    """Rows of a matrix."""
    opens: bool
    """Whether two matrices with the activation between them, or one that leads back."""
    has_gate_cap: bool
    has_up_cap: bool
    is_rounded: bool
    """Whether tokens are rounded to MXFP8 before they are multiplied."""

    def ring(self, most: int) -> int:
        """Return how many chunks of weights are on their way, at most so many: they must divide those of a row."""
        return next(ring for ring in RINGS if ring <= most and self.width // WIDTHS % ring == 0)

    def macros(self, columns: int, warps: int, ring: int, **others: int) -> Defines:
        """Return what the source is compiled with."""
        own = {
            "K": self.width, "ROWS": self.rows, "COLUMNS": columns, "RING": ring, "OPENS": int(self.opens),
            "HAS_GATE_CAP": int(self.has_gate_cap), "HAS_UP_CAP": int(self.has_up_cap),
            "ROUNDED": int(self.is_rounded), "WARPS": warps,
        }  # fmt: skip
        return tuple((own | others).items())


def shapes(width: int, inner_dim: int, activation: Any, *, rounded: bool) -> tuple[Shape, Shape]:
    """Return the shapes of the products that open and of those that lead back."""
    has_caps = activation.gate_cap is not None, activation.up_cap is not None
    return Shape(width, inner_dim, True, *has_caps, rounded), Shape(inner_dim, width, False, False, False, rounded)


def unsupported(hidden: Tensor, gate: Mxfp4, up: Mxfp4, down: Mxfp4, activation: Any) -> str | None:
    """Say what of these inputs neither kernel can take, if anything."""
    if not hidden.is_cuda or not nvrtc.is_available() or torch.cuda.get_device_capability(hidden.device)[0] < 9:
        return "this device or installation"
    if hidden.dtype is not torch.bfloat16:
        return f"dtype `{hidden.dtype}`"
    if not hasattr(activation, "gate_cap"):
        return "another activation than SiTU-GLU and SwiGLU"
    number, inner_dim, _ = gate.packed.shape
    if hidden.shape[1] % WIDTHS or inner_dim % WIDTHS:
        return f"widths `{hidden.shape[1]}` and `{inner_dim}`"
    if number > MOST_EXPERTS:
        return f"{number} experts"
    if not all(part.is_contiguous() and part.data_ptr() % 16 == 0 for weight in (gate, up, down) for part in weight):
        return "weights with gaps between them"
    return None


def plan(expert: Int[Tensor, "T k"], num_experts: int, columns: int) -> WorkPlan:
    """Sort the pairs and cut each expert's into items of at most so many."""
    pairs, kept = expert.numel(), {"dtype": torch.int32, "device": expert.device}
    made = WorkPlan(
        torch.empty(pairs, **kept), torch.empty(most_items(pairs, num_experts, columns), 4, **kept),
        torch.empty(1, **kept),
    )  # fmt: skip
    defines = ("EXPERTS", num_experts), ("MOST", columns), ("THREADS", THREADS), ("CHANNELS", 4)
    function = nvrtc.load((PLAN,), "plan", defines, 0, expert.device.index)
    nvrtc.launch(function, (1,), THREADS, 0, [expert.long().contiguous(), ctypes.c_int(pairs), *made])
    return made


def most_items(pairs: int, num_experts: int, columns: int) -> int:
    """Return how many items there may be, however the pairs fall."""
    return min(num_experts, pairs) + pairs // columns


def caps(activation: Any) -> ctypes.Array[Any]:
    """Return the activation's caps and their inverses as the kernels take them."""
    found = [cap or 1.0 for cap in (activation.gate_cap, activation.up_cap)]
    return (ctypes.c_float * 4)(*found, *(1 / cap for cap in found))


def add(returned: Float[Tensor, "P L"], output: Float[Tensor, "T L"]) -> None:
    """Write the sum of what each token's experts returned, in the order of its choice."""
    tokens, width = output.shape
    defines = ("EXPERTS", 1), ("MOST", 1), ("THREADS", THREADS), ("CHANNELS", width)
    function = nvrtc.load((PLAN,), "add", defines, 0, output.device.index)
    values = [returned, ctypes.c_int(len(returned) // tokens), output]
    nvrtc.launch(function, (tokens, -(-width // 1024)), 256, 0, values)


@lru_cache(maxsize=64)
def processors(device: int) -> int:
    """Return how many processors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
