"""MXFP4 to BF16 and back beside compressed-tensors' own functions and a plain copy of memory: one data, one run.

Run: python -m benchmarks.formats_mx   (compared where compressed-tensors is installed: extra `dev`)

Speeds are BF16 bytes a second, so unpacking and copying are charged for the same bytes of result. The other side is
given finished scales to pack with; ours finds them. Memory is taken anew for each result, as both libraries do by
themselves, and for `into memory at hand` it is not.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from triax.kernels.mx import mxfp4

BAR = 2.0  # times compressed-tensors
AIM = 0.6  # of a copy's speed, unpacking
SHAPE = (3072, 3584)  # w1 of an expert of K3
NUM_EXPERTS = 4  # together past any cache
RUNS = 7


def mx(runs: int = RUNS) -> dict[str, float]:
    """Print and return the speeds of all sides, timed in turn, so that a slow moment touches all of them."""
    weights = [
        (torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()
        for seed in range(NUM_EXPERTS)
    ]
    pairs = [mxfp4.quantize(weight) for weight in weights]
    target = torch.empty(SHAPE, dtype=torch.bfloat16)
    sides: dict[str, Sequence[Callable[[], object]]] = {
        "copy": [weight.clone for weight in weights],
        "copy_at_hand": [lambda weight=weight: target.copy_(weight) for weight in weights],
        "unpack": [lambda pair=pair: mxfp4.dequantize(*pair) for pair in pairs],
        "unpack_at_hand": [lambda pair=pair: mxfp4.dequantize(*pair, out=target) for pair in pairs],
        "pack": [lambda weight=weight: mxfp4.quantize(weight) for weight in weights],
    }
    theirs = _theirs(weights, pairs)
    sides |= theirs
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(runs + 1):
        for name, calls in sides.items():
            start = time.perf_counter()
            for call in calls:
                call()
            if run:  # the first one fills caches and tables
                times[name].append(time.perf_counter() - start)
    size = 2 * NUM_EXPERTS * SHAPE[0] * SHAPE[1]
    result = {name: size / statistics.median(seconds) for name, seconds in times.items()}
    print(f"mxfp4, {NUM_EXPERTS} matrices of {SHAPE[0]} x {SHAPE[1]}, {torch.get_num_threads()} threads, GB/s of BF16")
    print(f"  copy          {result['copy'] / 1e9:6.2f}, into memory at hand {result['copy_at_hand'] / 1e9:6.2f}")
    print(f"  MXFP4 to BF16 {result['unpack'] / 1e9:6.2f}, into memory at hand {result['unpack_at_hand'] / 1e9:6.2f}")
    print(f"  BF16 to MXFP4 {result['pack'] / 1e9:6.2f}")
    for ending in ("", "_at_hand"):
        result[f"unpack_over_copy{ending}"] = share = result[f"unpack{ending}"] / result[f"copy{ending}"]
        print(f"  unpack{ending} over copy{ending}: {share:.0%}; aim {AIM:.0%}: {'kept' if share >= AIM else 'MISSED'}")
    if not theirs:
        print("  compressed-tensors is not installed: no comparison")
        return result
    for what in ("unpack", "pack"):
        result[f"{what}_times"] = ratio = result[what] / result[f"their_{what}"]
        print(f"  {what}: {ratio:.1f} times compressed-tensors' {result[f'their_{what}'] / 1e9:.2f}")
        print(f"    bar {BAR:.0f} times: {'kept' if ratio >= BAR else 'MISSED'}")
    return result


def _theirs(weights: Sequence[Tensor], pairs: Sequence[mxfp4.Mxfp4]) -> dict[str, Sequence[Callable[[], object]]]:
    """Return the other library's calls, after both were seen to give the same bytes and numbers."""
    try:
        compressor = import_module("compressed_tensors.compressors.mxfp4.base").MXFP4PackedCompressor
        settings = import_module("compressed_tensors.quantization")
    except ImportError:
        return {}
    form: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    scheme = settings.QuantizationScheme(
        targets=["Linear"], weights=settings.QuantizationArgs(**form, symmetric=True, scale_dtype=torch.uint8)
    )
    released = [{"weight_packed": pair.packed, "weight_scale": pair.scale} for pair in pairs]
    fresh = [
        {"weight": weight, "weight_scale": torch.exp2(pair.scale.float() - 127).bfloat16()}
        for weight, pair in zip(weights, pairs, strict=True)
    ]
    for state, plain, pair in zip(released, fresh, pairs, strict=True):
        number = compressor.decompress(state, scheme)["weight"]
        packed = compressor.compress(plain, scheme)["weight_packed"]
        if not torch.equal(number, mxfp4.dequantize(*pair)) or not torch.equal(packed, pair.packed):
            raise SystemExit("mxfp4: the two libraries differ; nothing was timed")
    return {
        "their_unpack": [lambda state=state: compressor.decompress(state, scheme) for state in released],
        "their_pack": [lambda state=state: compressor.compress(state, scheme) for state in fresh],
    }


if __name__ == "__main__":
    mx()
