"""F09: packed weights that are read, saved and packed again: the same bytes where nothing was trained."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from triax.checkpoint.convert import convert
from triax.checkpoint.load import load_released
from triax.checkpoint.plan import make_plan
from triax.checkpoint.released import save_released
from triax.checkpoint.verify import verify
from triax.cli.app import main
from triax.errors import CheckpointError, ConfigError

FORM = {"kimi_k3": "mxfp4", "kimi_k2": "fp8", "kimi_k25": "int4"}


def bytes_of(folder):
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def odd(tensors, form):
    """Give some groups what a quantiser of ours would never choose: zeros under other scales, small codes, -8."""
    for name, tensor in tensors.items():
        if form == "mxfp4" and name.endswith("weight_packed"):
            tensor[0, :16] = 0x80  # zeros of both signs
            tensor[1, :16] = 0x11  # no code above 0.5
            tensor[2, :16] = 0x23
        elif form == "int4" and name.endswith("weight_packed"):
            tensor[0, :4] = -0x77777778  # every integer 0
            tensor[1, :4] = 0x0FFFFFFF  # the largest, and one -8
            tensor[2, :4] = 0x0A0A0A0A  # -8 and 2
        elif form == "fp8" and tensor.dtype == torch.float8_e4m3fn:
            codes = tensor.view(torch.uint8)
            codes[:128, :128] = codes[:128, :128] & 0x3F | 0x08  # none near the largest
            codes[0, 0] = 0x80
        elif form == "fp8" and name.endswith("_scale_inv"):
            tensor[0, 0] = 0.0117
    return tensors


@pytest.fixture(scope="module", params=FORM)
def release(request, miniature, tmp_path_factory):
    """A miniature with odd groups, its form, and an export of its decoder, which nobody changes."""
    folder = tmp_path_factory.mktemp(request.param) / "release"
    miniature.write(request.param, folder)
    form = FORM[request.param]
    for path in folder.glob("*.safetensors"):
        save_file(odd(load_file(path), form), path)
    assert verify(folder).is_whole
    export = folder.with_name("export")
    save_released(load_released(folder), export, family=request.param)
    return folder, form, export


def pack(source, target, form, **options):
    convert(make_plan(source, form, **options), target)
    return bytes_of(target)


def test_f09_what_was_not_trained_is_packed_to_the_same_bytes(release, tmp_path):
    folder, form, export = release
    assert pack(export, tmp_path / "again", form, like=folder) == bytes_of(folder)
    again, released = (json.loads((place / "config.json").read_text()) for place in (tmp_path / "again", folder))
    texts = [config.get("text_config", config) for config in (again, released)]
    assert texts[0]["quantization_config"] == texts[1]["quantization_config"]
    pack(folder, tmp_path / "bf16", "bf16")
    assert pack(tmp_path / "bf16", tmp_path / "back", form, like=folder) == bytes_of(folder)
    assert verify(tmp_path / "back").is_whole


def test_f09_only_the_groups_that_changed_are_packed_anew(release, tmp_path):
    folder, form, export = release
    trained = shutil.copytree(export, tmp_path / "trained")
    (path,) = trained.glob("*.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts.1." in name and name.endswith(("up_proj.weight", "w3.weight")))
    size = (128, 128) if form == "fp8" else (1, 32)
    row = 128 if form == "fp8" and tensors[name].shape[0] > 128 else 0 if form == "fp8" else 3
    tensors[name][row, 33 if form != "fp8" else 0] += 0.5
    save_file(tensors, path)
    found, released = pack(trained, tmp_path / "again", form, like=folder), bytes_of(folder)
    differ = {key for key in released if found[key] != released[key]}
    assert differ
    assert all(key.startswith(name) for key in differ)
    after, before = (load_released(place).state_dict() for place in (tmp_path / "again", folder))
    moved = [(key, (after[key] != before[key]).nonzero()) for key in before if not torch.equal(after[key], before[key])]
    assert len(moved) == 1
    places = moved[0][1][:, -2:]
    first = (row // size[0] * size[0], (33 if form != "fp8" else 0) // size[1] * size[1])
    assert (places[:, 0] >= first[0]).all()
    assert (places[:, 0] < first[0] + size[0]).all()
    assert (places[:, 1] >= first[1]).all()
    assert (places[:, 1] < first[1] + size[1]).all()


def test_f09_packing_without_the_release_says_that_bytes_change(release, tmp_path):
    folder, form, export = release
    plan = make_plan(export, form)
    assert any("`--like RELEASE` keeps its bytes" in note for note in plan.notes)
    assert not any("--like" in note for note in make_plan(export, form, like=folder).notes)
    assert not any("--like" in note for note in make_plan(folder, form).notes)
    assert plan.fingerprint != make_plan(export, form, like=folder).fingerprint
    assert pack(export, tmp_path / "fresh", form) != bytes_of(folder)


def test_f09_what_is_not_the_release_is_refused(release, miniature, tmp_path):
    folder, form, export = release
    with pytest.raises(ConfigError, match="--like: keeps codes and scales; found a form without them"):
        make_plan(folder, "bf16", like=folder)
    with pytest.raises(CheckpointError, match=f"holds no weights in {form} to be like; found plain ones"):
        make_plan(export, form, like=export)
    miniature.write("kimi_k3" if form != "mxfp4" else "kimi_k25", tmp_path / "other")
    with pytest.raises(CheckpointError, match=f"holds no weights in {form} to be like"):
        make_plan(export, form, like=tmp_path / "other")


def test_f09_another_model_in_the_same_form_is_refused(miniature, tmp_path):
    for name, more in (("one", 0), ("other", 32)):
        sizes = miniature.toy("kimi_k25")
        miniature.write("kimi_k25", tmp_path / name, miniature.replace(sizes, expert=sizes.expert + more))
    pack(tmp_path / "one", tmp_path / "bf16", "bf16")
    with pytest.raises(CheckpointError, match=r"other: is another model; found for .* where .* is needed"):
        make_plan(tmp_path / "bf16", "int4", like=tmp_path / "other")


def test_f09_the_verb_takes_the_release(release, tmp_path):
    folder, form, export = release
    with pytest.raises(SystemExit) as end:
        main(["convert", str(export), str(tmp_path / "again"), "--to", form, "--like", str(folder)])
    assert not end.value.code
    assert bytes_of(tmp_path / "again") == bytes_of(folder)
