"""The paged attention of K3's latents, 512 and 64 wide, on Hopper's matrix units without padding the heads."""

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triax.errors import UnsupportedError
from triax.kernels import nvrtc
from triax.kernels.mla.split import LOG2_E, joined, processors, splits, workspace

SOURCES = (Path(__file__).with_name("engine.cuh"), Path(__file__).with_name("hopper.cu"))
LATENT, WIDTH, PAGE = 512, 576, 64
MOST_HEADS = 96
THREADS = 512
PAGE_BYTES = 64 * 576  # of shared memory: half of the channels
ROOM = 227 * 1024  # bytes of shared memory a block may have

TYPES = """
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { char bytes[128]; };
"""


def unsupported(query: Tensor, latent: Tensor, value_dim: int) -> str | None:
    """Say what of these inputs the kernel cannot take, if anything."""
    if query.dtype is not torch.bfloat16 or latent.dtype is not torch.bfloat16:
        return f"dtypes `{query.dtype}` and `{latent.dtype}`"
    if latent.shape[1:] != (PAGE, WIDTH) or value_dim != LATENT:
        return f"pages of `{tuple(latent.shape[1:])}` with latents of `{value_dim}`"
    if not latent.is_contiguous() or latent.data_ptr() % 16:
        return "pages that do not follow each other in memory"
    if not nvrtc.is_available() or torch.cuda.get_device_capability(query.device)[0] != 9:
        return "this GPU or installation"
    return None


def decode(
    query: Float[Tensor, "N W H L"],
    latent: Float[Tensor, "pages page L"],
    table: Int[Tensor, "N P"],
    seen: Int[Tensor, "N W"],
    scale: float,
    value_dim: int,
) -> Float[Tensor, "N W H V"]:
    """See `triax.kernels.mla.decode`.

    Raises:
        UnsupportedError: The kernel has no form for these dtypes, widths or pages, or for this GPU.
    """
    reason = unsupported(query, latent, value_dim)
    if reason is not None:
        raise UnsupportedError(
            f"kernels.mla.hopper: no kernel for {reason}; it takes bf16 pages of {PAGE} tokens, {WIDTH} wide, latents "
            f"{LATENT} wide, on Hopper; `triax.kernels.mla.decode` takes another kernel by itself"
        )
    count, queries, heads, _ = query.shape
    if not query.numel():
        return query.new_empty(count, queries, heads, value_dim, dtype=torch.float32)
    groups = -(-heads // MOST_HEADS)
    columns = -(-heads // (groups * 16)) * 16
    groups = -(-heads // columns)
    parts = splits(count * queries * groups, table.shape[1], processors(query.device) // 2)
    query, table, seen = query.contiguous(), table.int(), seen.int()
    query = query if query.data_ptr() % 16 == 0 else query.clone()  # the copy engine reads from multiples of 16 bytes
    table = table if table.stride(-1) == 1 else table.contiguous()
    part, summary = workspace(query, parts, value_dim)
    ring = ring_pages(columns)
    shared = shared_bytes(columns, ring)
    with torch.cuda.device(query.device):
        function = _function(columns, ring, shared, query.device.index)
        rows, tokens = count * queries * heads, len(latent) * PAGE
        values = [
            _map(query.data_ptr(), rows, (64, columns // 2)),
            _map(query.data_ptr(), rows, (32, columns // 2)),
            _map(latent.data_ptr(), tokens, (64, PAGE)),
            _map(latent.data_ptr(), tokens, (32, PAGE)),
            *(table, seen, part, summary),
            *(ctypes.c_int(x) for x in (table.stride(0), *seen.stride(), queries, heads)),
            ctypes.c_float(scale * LOG2_E),
        ]
        nvrtc.launch(function, (count * queries * groups * 2, parts), THREADS, shared, values)
    return part[:, :, 0] if parts == 1 else joined(part, summary)


def ring_pages(columns: int) -> int:
    """Return how many pages' halves find room beside the queries, logits and shares of this many heads."""
    return min(4, (ROOM - shared_bytes(columns, 0)) // PAGE_BYTES)


def shared_bytes(columns: int, ring: int) -> int:
    """Return the bytes of shared memory that a block needs: the source's arrays, in its order."""
    barriers, notes, numbers = 8 * (ring + 8), 4 * (2 * columns + 16), 4 * (17 * columns // 2 + 2)
    return ring * PAGE_BYTES + columns * (576 + 4 * 128) + barriers + notes + numbers + 16


def products(columns: int) -> str:
    """Return what stands before the source for this many heads."""
    logits, means = _product("of_logits", columns, lying=0), _product("of_means", columns, lying=1)
    return TYPES + logits + means


def _product(name: str, columns: int, *, lying: int) -> str:
    """Write `d [64, columns] (+)= a [64, 16] b [16, columns]` from shared memory; `lying`: a comes transposed."""
    count = columns // 2
    sums = ",".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void {name}(float (&d)[{count}], u64 a, u64 b, int add) {{\n"
        f'    asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"\n'
        f'                 "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{sums}}}, %{count}, "\n'
        f'                 "%{count + 1}, add, 1, 1, {lying}, 0;\\n}}"\n'
        f'                 : {outputs}\n                 : "l"(a), "l"(b), "r"(add));\n}}\n'
    )


@lru_cache(maxsize=16)
def _function(columns: int, ring: int, shared: int, device: int) -> Any:
    defines = (("HEADS", columns), ("RING", ring), ("INFINITY", "__int_as_float(0x7f800000)"))
    return nvrtc.load(SOURCES, "attend", defines, shared, device, products(columns))


@lru_cache(maxsize=256)
def _map(address: int, rows: int, box: tuple[int, int]) -> Any:
    """Describe rows of bf16 latents to the copy engine, which brings a box of 64 or 32 channels by rows at a time."""
    driver = nvrtc.driver()
    swizzles = driver.CUtensorMapSwizzle
    _, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address,
        [driver.cuuint64_t(WIDTH), driver.cuuint64_t(rows)], [driver.cuuint64_t(WIDTH * 2)],
        [driver.cuuint32_t(size) for size in box], [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if box[0] == 64 else swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    return (ctypes.c_char * 128).from_buffer_copy(ctypes.string_at(encoded.getPtr(), 128))
