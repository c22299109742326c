"""A checkpoint is whole or it is not taken."""

import errno
import json
import resource
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triax.checkpoint import sharded, tree
from triax.errors import CheckpointError


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "model": {"weight": weight, "bias": torch.randn(3, generator=generator).bfloat16(), "view": weight[0]},
        "optimizer": {"state": {0: {"momentum": weight.T, "step": torch.tensor(7)}}, "betas": (0.9, 0.95)},
        "rng": torch.get_rng_state(),
        "progress": {"step": 3, "loss": [0.1, float("inf")], "name": None, "empty": torch.zeros(0, 4)},
    }


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_same(*pair)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


def save(folder, step, seed=0, keep=9):
    return sharded.save(folder, step, state(seed), {"model.width": 8}, keep=keep)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
keys = st.text("ab$", max_size=3) | st.integers(-3, 3)
nests = st.recursive(
    leaves | st.builds(torch.arange, st.integers(0, 5)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(nest=nests)
def test_any_nest_splits_and_joins_to_itself(nest):
    skeleton, tensors = tree.split(nest)
    assert_same(tree.join(json.loads(json.dumps(skeleton)), tensors), nest)


def test_tensors_whose_paths_read_alike_are_refused():
    with pytest.raises(TypeError, match="two tensors at `1`"):
        tree.split({1: torch.zeros(1), "1": torch.zeros(2)})


def test_a_state_that_cannot_be_stored_names_its_place():
    with pytest.raises(TypeError, match=r"state `a/1` holds a object"):
        tree.split({"a": [1, object()]})


@pytest.mark.parametrize("shard_bytes", [1, 40, 2**29])
def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path, monkeypatch, shard_bytes):
    monkeypatch.setattr(sharded, "SHARD_BYTES", shard_bytes)
    place = save(tmp_path / "checkpoints", 3)
    assert place.name == "step-3"
    assert_same(sharded.load(place), state())
    assert_same(sharded.load(place, ["model"]), {"model": state()["model"]})
    assert sharded.settings_of(place) == {"model.width": 8}
    assert sharded.verify(place)["step"] == 3


def test_the_newest_is_chosen_by_number_and_drafts_are_never_taken(tmp_path):
    for step in (9, 10):
        save(tmp_path, step)
    shutil.copytree(tmp_path / "step-10", tmp_path / "step-11.tmp")
    assert sharded.newest(tmp_path).name == "step-10"
    save(tmp_path, 12)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_without_checkpoints_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        sharded.newest(tmp_path / "absent")


def test_only_the_last_checkpoints_stay(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]


def test_a_damaged_checkpoint_takes_no_place_from_a_whole_one(tmp_path):
    for step in range(1, 4):
        save(tmp_path, step)
    truncate(tmp_path / "step-3" / "state.json")
    save(tmp_path, 4, keep=2)
    assert [path.name for path in sharded.whole(tmp_path)] == ["step-4", "step-2"]
    assert (tmp_path / "step-3").exists(), "what is damaged is left for a person to look at"
    assert not (tmp_path / "step-1").exists()


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, disk):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
        disk.check()
    assert len(disk.synced) > 3 * len(list((tmp_path / "step-3").iterdir()))


def test_settings_that_were_altered_are_not_believed(tmp_path):
    place = save(tmp_path, 1)
    text = (place / "settings.json").read_text()
    (place / "settings.json").write_text(text.replace("8", "9"))
    with pytest.raises(CheckpointError, match=r"settings\.json` does not have its recorded SHA-256"):
        sharded.settings_of(place)


def test_a_whole_checkpoint_of_the_same_step_is_left_as_it_is(tmp_path):
    place = save(tmp_path, 1)
    before = {path.name: path.stat().st_ino for path in place.iterdir()}
    assert save(tmp_path, 1, seed=1) == place
    assert {path.name: path.stat().st_ino for path in place.iterdir()} == before


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def alter(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [truncate, alter, lambda file: file.unlink()], ids=["truncated", "altered", "absent"]
)
@pytest.mark.parametrize("name", ["model-00000.safetensors", "state.json"])
def test_a_damaged_file_is_named_together_with_the_older_whole_checkpoint(tmp_path, damage, name):
    save(tmp_path, 1)
    place = save(tmp_path, 2)
    damage(place / name)
    for read in (sharded.load, sharded.verify):
        with pytest.raises(
            CheckpointError, match=rf"step-2: file `{name}`.*move `step-2` away to resume from `step-1`"
        ):
            read(place)


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"format": 99, "files": {}}'])
def test_a_damaged_manifest_is_an_error_of_the_checkpoint(tmp_path, content):
    place = save(tmp_path, 2)
    manifest = place / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json|unknown format"):
        sharded.load(place)


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    truncate(save(tmp_path, 2) / "state.json")
    assert sharded.whole(tmp_path) == []
    assert_same(sharded.load(save(tmp_path, 2)), state())


def test_a_full_disk_is_reported_and_leaves_older_checkpoints_whole(tmp_path):
    save(tmp_path, 1, keep=1)
    big = {"model": {"weight": torch.zeros(100_000)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"step-2: the checkpoint could not be written.*remain: `step-1`"
        ) as caught:
            sharded.save(tmp_path, 2, big, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert_same(sharded.load(tmp_path / "step-1"), state())


def test_a_path_that_cannot_be_a_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "file" / "checkpoints", 1)
