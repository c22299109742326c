"""Conversion of a miniature of some gigabytes beside a plain copy of the same files: bytes a second and memory.

Run: python -m benchmarks.formats_convert [GIGABYTES]

The miniature has K3's form at reduced width: MXFP4 experts in many files. Every side is synced to disk. `disk` is what
a copy of the source reaches; a conversion writes more than it reads (MXFP4 to BF16) or less (BF16 to MXFP4), so rates
are of bytes read and written together.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from triax.checkpoint.compose import compose
from triax.checkpoint.convert import convert as convert_folder
from triax.checkpoint.convert import write_text
from triax.checkpoint.header import DTYPES, SIZES, write_header
from triax.checkpoint.names import inventory
from triax.checkpoint.plan import Target, make_plan
from triax.config.load import load_model
from triax.config.model import Model

GIGABYTES = 4.0
SHARD_BYTES = 2**29


def settings_of(gigabytes: float) -> Model:
    """Return K3 with a quarter of its width, in as many layers as about so many BF16 bytes hold."""
    tree = load_model("k3").model_dump()
    tree |= {"width": 1792, "vocab_size": 16384, "dense_dim": 4096, "context_len": 4096}
    tree["kda"] |= {"num_heads": 8}
    tree["mla"] |= {"num_heads": 8}
    tree["moe"] |= {"num_experts": 64, "expert_dim": 1536, "latent_dim": 1792}
    layers = max(2, round(gigabytes * 1e9 / (64 * 3 * 1536 * 1792 * 2)) + 1)
    return Model.model_validate(tree | {"num_layers": layers, "mla_layers": (layers - 1,), "num_dense_layers": 1})


def write_source(folder: Path, gigabytes: float) -> int:
    """Write plain weights of random numbers, file by file, and return their bytes."""
    settings = settings_of(gigabytes)
    folder.mkdir()
    write_text(folder / "config.json", json.dumps(compose(settings, "kimi_k3")))
    noise = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    room = SHARD_BYTES
    for spec in inventory(settings, "kimi_k3"):
        shards[-1][spec.name] = (spec.dtype, spec.shape)
        room -= torch.Size(spec.shape).numel() * SIZES[spec.dtype]
        if room < 0:
            shards.append({})
            room = SHARD_BYTES
    total = 0
    for number, shard in enumerate(shards):
        header, places = write_header(shard)
        with (folder / f"part-{number}.safetensors").open("wb") as file:
            file.write(header)
            for name, (dtype, shape) in shard.items():
                size = torch.Size(shape).numel()
                values = noise.repeat(-(-size // len(noise)))[:size].clone()
                if name.endswith("A_log") and len(shape) == 1:
                    values[settings.kda.num_heads if settings.kda else 0 :] = 0
                file.seek(places[name])
                file.write(values.to(DTYPES[dtype]).view(torch.uint8).numpy().data)
        total += os.path.getsize(folder / f"part-{number}.safetensors")
    return total


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the work is on the disk."""
    os.sync()
    start = time.perf_counter()
    work()
    os.sync()
    return time.perf_counter() - start


def _run(source: Path, target: Path, to: Target) -> None:
    convert_folder(make_plan(source, to), target)


def bytes_of(folder: Path) -> int:
    """Return the bytes of a folder's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def convert(gigabytes: float = GIGABYTES) -> dict[str, float]:
    """Print and return the rates of a copy and of conversions there and back."""
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("TRIAX_BENCH_DIR")) as name:
        place = Path(name)
        source = write_source(place / "bf16", gigabytes)
        print(f"source: {source / 1e9:.2f} GB of BF16 in {len(list((place / 'bf16').glob('*.safetensors')))} files")
        seconds = timed(lambda: shutil.copytree(place / "bf16", place / "copy"))
        result["copy_gb_per_s"] = 2 * source / seconds / 1e9
        print(f"copy:              {seconds:6.1f} s  {result['copy_gb_per_s']:5.2f} GB/s read and written")
        shutil.rmtree(place / "copy")
        steps: tuple[tuple[str, str, Target], ...] = (
            ("bf16", "mxfp4", "mxfp4"),
            ("mxfp4", "again", "mxfp4"),
            ("mxfp4", "back", "bf16"),
        )
        for before, after, to in steps:
            read, write = place / before, place / after
            seconds = timed(partial(_run, read, write, to))
            moved = bytes_of(read) + bytes_of(write)
            key = f"{before}_to_{after}_gb_per_s"
            result[key] = moved / seconds / 1e9
            share = result[key] / result["copy_gb_per_s"]
            print(f"{before:>6} to {after:<7}: {seconds:6.1f} s  {result[key]:5.2f} GB/s, {share:.0%} of the copy")
            if after == "again":
                shutil.rmtree(write)
    return result


if __name__ == "__main__":
    convert(float(sys.argv[1]) if len(sys.argv) > 1 else GIGABYTES)
