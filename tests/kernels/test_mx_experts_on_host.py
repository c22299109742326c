"""The CUDA kernels of experts with MXFP4 weights, run on this CPU a thread for a thread, against the definition."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from triax.kernels.mx import mxfp8
from triax.kernels.mx.experts import looped, sliced, streamed, work_plan
from triax.kernels.mx.mxfp4 import Mxfp4
from triax.kernels.situ_glu import SituGlu

WARPS = 2
CALLS = {
    streamed.STREAM: """
extern "C" void run(int blocks, const u16 *x, int each, void **w, const int *order, const Item *items, const int *count,
                    const float *share, void *out, const float *caps, uint4 *) {
    const Caps c = {caps[0], caps[1], caps[2], caps[3]};
    const u8 *p[4] = {(u8 *)w[0], (u8 *)w[1], (u8 *)w[2], (u8 *)w[3]};
    on_host(blocks, THREADS, [=] { stream(x, each, p[0], p[1], p[2], p[3], order, items, count, share, out, c); });
}
""",
    sliced.SLICES: """
extern "C" void run(int blocks, const u16 *x, int each, void **w, const int *order, const Item *items, const int *count,
                    const float *share, void *out, const float *caps, uint4 *arranged) {
    const Caps c = {caps[0], caps[1], caps[2], caps[3]};
    const u8 *p[4] = {(u8 *)w[0], (u8 *)w[1], (u8 *)w[2], (u8 *)w[3]};
    on_host((*count + 1) * EIGHTS, THREADS, [=] { arrange(x, each, order, items, count, arranged); });
    on_host(blocks, THREADS, [=] {
        multiply_slices(arranged, p[0], p[1], p[2], p[3], order, items, count, share, out, c);
    });
}
""",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Compile a kernel for this CPU and run it: `run(source, defines, ...)`."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to run CUDA C++ on a CPU; found none")
    folder = tmp_path_factory.mktemp("host")

    def compiled(path, defines):
        library = folder / f"{abs(hash((path, defines)))}.so"
        if not library.exists():
            parts = [Path(__file__).with_name("warps.h"), work_plan.WEIGHTS, path]
            source = library.with_suffix(".cpp")
            source.write_text("".join(f'#include "{part}"\n' for part in parts) + CALLS[path])
            options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
            macros = [f"-D{name}={value}" for name, value in defines]
            subprocess.run([compiler, *options, *macros, source, "-o", library], check=True)
        return ctypes.CDLL(str(library)).run

    return compiled


def made(E, F, L, T, k, seed):
    torch.manual_seed(seed)
    weights = []
    for rows, columns in ((F, L), (F, L), (L, F)):
        code = torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8)
        weights.append(Mxfp4(code, torch.randint(121, 125, (E, rows, columns // 32), dtype=torch.uint8)))
    chosen = torch.rand(T, E).topk(k).indices
    return (torch.randn(T, L).bfloat16(), chosen, torch.rand(T, k)), weights


def plan(expert, columns):
    """Sort and cut as the planning kernel does."""
    chosen, order = expert.flatten().sort(stable=True)
    items = []
    for one in chosen.unique().tolist():
        (places,) = (chosen == one).nonzero(as_tuple=True)
        for first in range(0, len(places), columns):
            items.append([one, int(places[first]), min(columns, len(places) - first), 0])
    return order.int(), torch.tensor(items, dtype=torch.int32), torch.tensor([len(items)], dtype=torch.int32)


def pointer(x):
    return ctypes.c_void_p(0 if x is None else x.data_ptr())


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("path", "columns", "ring", "shape", "rounded"),
    [
        (streamed.STREAM, 8, 2, (3, 128, 256, 5, 2), False),
        (streamed.STREAM, 8, 1, (2, 128, 128, 11, 1), True),
        (streamed.STREAM, 8, 3, (2, 128, 384, 3, 2), False),
        (sliced.SLICES, 16, 2, (2, 128, 256, 19, 1), True),
        (sliced.SLICES, 32, 1, (2, 128, 256, 21, 2), False),
    ],
)
def test_kernels_give_the_definition(run, path, columns, ring, shape, rounded):
    (hidden, chosen, share), weights = made(*shape, seed=columns + ring)
    activation = SituGlu(4.0, None)
    expected = looped.experts(
        hidden, chosen, share, *weights, activation, mxfp8.rounded if rounded else lambda rows: rows
    )
    order, items, count = plan(chosen, columns)
    inner = torch.full((chosen.numel(), shape[1]), torch.nan, dtype=torch.bfloat16)
    returned = torch.full((chosen.numel(), shape[2]), torch.nan)
    arranged = torch.full((len(items) * columns * max(shape[1:3]),), torch.nan, dtype=torch.bfloat16)
    gate, up, down = weights
    sizes = work_plan.shapes(shape[2], shape[1], activation, rounded=rounded)
    for size, rows, each, parts, out in (
        (sizes[0], hidden, chosen.shape[1], (gate.packed, up.packed, gate.scale, up.scale), inner),
        (sizes[1], inner, 1, (down.packed, None, down.scale, None), returned),
    ):
        own = {"BLOCKS": 1} if path is streamed.STREAM else {"STAGES": 2}
        defines = size.macros(columns, WARPS, size.ring(ring), **own)
        found = (ctypes.c_void_p * 4)(*(pointer(part).value for part in parts))
        run(path, defines)(
            3, pointer(rows), each, found, *map(pointer, (order, items, count, share, out)),
            work_plan.caps(activation), pointer(arranged),
        )  # fmt: skip
    error = (returned.view(*chosen.shape, -1).sum(1) - expected).norm() / expected.norm()
    assert error < (1.5e-2 if rounded else 6e-3)
