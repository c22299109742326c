"""What each release holds, by our inventory: counts and bytes of the published files, and the names of the tables."""

import json
from functools import cache
from math import prod
from pathlib import Path

import pytest

from triax.checkpoint.forms import is_released_as, parts
from triax.checkpoint.header import SIZES
from triax.checkpoint.names import inventory
from triax.checkpoint.published import parse

FOLDER = Path(__file__).parent / "published"


@cache
def tensors(family, form):
    """Every tensor of a release by name: shape and dtype."""
    published = parse(json.loads((FOLDER / f"{family}.json").read_text()))
    settings = published.settings.model_copy(update={"vision": published.vision})
    found = {}
    for spec in inventory(settings, published.family):
        for part in parts(spec, form if is_released_as(spec, form) else "plain"):
            found[part.name] = (part.shape, part.dtype)
    return found


@pytest.mark.parametrize(
    ("family", "form", "num_tensors", "elements", "rotary"),
    [
        ("kimi_k3", "mxfp4", 497_220, 1_503_647_073_024, 0),
        ("kimi_linear", "plain", 20_493, 49_122_681_728, 0),
        ("kimi_k2", "fp8", 139_644, 1_026_470_731_056, 61),  # one table of 56 numbers a layer, which nobody reads
        ("kimi_k25", "int4", 208_550, 170_738_182_128, 0),
        ("moonlight", "plain", 5_317, 15_960_110_208, 0),
    ],
)
def test_tensors_and_elements_are_those_of_the_release(family, form, num_tensors, elements, rotary):
    found = tensors(family, form)
    assert len(found) + rotary == num_tensors
    assert sum(prod(shape) for shape, _ in found.values()) + 56 * rotary == elements


def test_k3_has_the_bytes_that_its_index_tells():
    assert sum(prod(shape) * SIZES[dtype] for shape, dtype in tensors("kimi_k3", "mxfp4").values()) == 1_560_860_324_864


@pytest.mark.parametrize(
    ("family", "form"),
    [("kimi_k3", "mxfp4"), ("kimi_linear", "plain"), ("kimi_k2", "fp8"), ("kimi_k25", "int4"), ("moonlight", "plain")],
)
def test_every_name_shape_and_dtype_is_that_of_the_published_tables(miniature, family, form):
    table = {}
    for shard in miniature.shards(family, miniature.FULL[family]):
        table |= {name: entry for name, entry in shard.items() if not name.endswith("inv_freq")}
    assert tensors(family, form) == table
