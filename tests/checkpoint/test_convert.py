"""`triax convert`: what is written, what is kept to the byte, and what a kill, a full disk or a fault leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from triax.checkpoint.account import account
from triax.checkpoint.convert import convert
from triax.checkpoint.load import load_released
from triax.checkpoint.plan import make_plan
from triax.checkpoint.scan import INDEX, UNFINISHED
from triax.checkpoint.verify import verify
from triax.cli.app import main
from triax.errors import CheckpointError
from triax.kernels.mx import mxfp4

FAMILIES = ("kimi_k3", "kimi_linear", "kimi_k2", "kimi_k25", "moonlight")
OWN = {"kimi_k3": "mxfp4", "kimi_linear": "bf16", "kimi_k2": "fp8", "kimi_k25": "int4", "moonlight": "bf16"}


@pytest.fixture(scope="module")
def made(miniature, tmp_path_factory):
    """A miniature of each family, which no conversion may change, and its tensors."""
    place = tmp_path_factory.mktemp("convert")
    return {family: (place / family, miniature.write(family, place / family)) for family in FAMILIES}


def tensors_of(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same_bytes(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    )


def run(source, target, to, **options):
    convert(make_plan(source, to, **options), target)
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_form_again_is_the_same_tensors_to_the_byte(made, tmp_path, family):
    folder, tensors = made[family]
    found = tensors_of(run(folder, tmp_path / "again", OWN[family], shard_bytes=100_000))
    assert found.keys() == tensors.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_holds_the_values_and_no_codes(miniature, made, tmp_path, family):
    folder, tensors = made[family]
    found = tensors_of(run(folder, tmp_path / "bf16", "bf16"))
    assert not [name for name in found if "_packed" in name or "_scale" in name]
    for name, tensor in found.items():
        assert torch.equal(tensor.double(), miniature.values_of(tensors, name).to(tensor.dtype).double()), name
    assert "quantization_config" not in (tmp_path / "bf16" / "config.json").read_text()
    assert verify(tmp_path / "bf16").is_whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("to", ["bf16", "mxfp4", "fp8", "int4", "triax"])
def test_every_form_of_every_family_is_whole_and_loads(made, tmp_path, family, to):
    folder, _ = made[family]
    run(folder, tmp_path / "out", to)
    assert verify(tmp_path / "out").is_whole
    forms = {entry.form for entry in account(tmp_path / "out").entries.values()}
    assert forms == ({"plain"} if to in ("bf16", "triax") else {"plain", to})
    whole, found = load_released(folder).state_dict(), load_released(tmp_path / "out").state_dict()
    assert whole.keys() == found.keys()
    for name, tensor in whole.items():
        if to in ("bf16", "triax", OWN[family]):
            assert torch.equal(found[name], tensor), name
        elif not torch.equal(found[name], tensor):
            assert to == "fp8" or ".experts." in name
            assert within_a_step(found[name].double(), tensor.double(), to), name


def within_a_step(found, value, form):
    """Whether each number lies within half a step of the form around the one it stands for.

    Above 2^-6 of the scale E4M3 has steps of 1/16 of a number at most, below it steps of 2^-9; integers have steps of
    the scale; E2M1 has steps of 0.5, 1 and 2 of the scale up to 2, 4 and 6, and what is above becomes 6.
    bf16 adds its own rounding of scale and product.
    """
    if form == "fp8":
        rows, columns = value.shape[-2:]
        edge = torch.nn.functional.pad(value, (0, -columns % 128, 0, -rows % 128))
        blocks = edge.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).abs().amax((-3, -1))
        largest = blocks.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :columns]
        bound = torch.maximum(value.abs() / 16, largest / 448 * 2**-10)
    else:
        largest = value.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
        if form == "int4":
            bound = largest / 14
        else:
            scale = 2 ** (largest.clamp(min=1e-30).log2().floor() - 2)
            size = value.abs() / scale
            bound = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, (size - 6).clamp(min=1))) * scale
    return bool(((found - value).abs() <= bound + value.abs() * 2**-7).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_our_own_layout_goes_back_to_the_released_one(made, tmp_path, family):
    run(made[family][0], tmp_path / "own", "triax")
    run(made[family][0], tmp_path / "bf16", "bf16")
    run(tmp_path / "own", tmp_path / "back", "bf16")
    expected, found = tensors_of(tmp_path / "bf16"), tensors_of(tmp_path / "back")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].double(), tensor.double()), name
        assert found[name].shape == tensor.shape


def test_fresh_bf16_to_mxfp4_and_back_is_stable_at_the_byte_level(made, tmp_path):
    first = run(made["kimi_linear"][0], tmp_path / "first", "mxfp4")
    values = run(first, tmp_path / "values", "bf16")
    second = run(values, tmp_path / "second", "mxfp4")
    expected, found = tensors_of(first), tensors_of(second)
    assert expected.keys() == found.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in expected.items())
    back = tensors_of(run(second, tmp_path / "back", "bf16"))
    assert all(same_bytes(back[name], tensor) for name, tensor in tensors_of(values).items())


def test_what_is_packed_is_what_the_one_quantiser_makes(made, tmp_path):
    found = tensors_of(run(made["kimi_linear"][0], tmp_path / "mx", "mxfp4"))
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    packed, scale = mxfp4.quantize(made["kimi_linear"][1][name])
    assert torch.equal(found[f"{name}_packed"], packed)
    assert torch.equal(found[f"{name}_scale"], scale)


def test_u091_packed_weights_are_unpacked_before_they_are_packed_otherwise(miniature, made, tmp_path):
    folder, tensors = made["kimi_k25"]
    found = tensors_of(run(folder, tmp_path / "mx", "mxfp4"))
    name = "language_model.model.layers.1.mlp.experts.0.up_proj.weight"
    packed, scale = mxfp4.quantize(miniature.values_of(tensors, name).bfloat16())
    assert torch.equal(found[f"{name}_packed"], packed)
    assert torch.equal(found[f"{name}_scale"], scale)
    assert f"{name}_shape" not in found
    written = json.loads((tmp_path / "mx" / "config.json").read_text())
    assert written["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"


def test_an_fp32_export_is_rounded_where_the_release_is_bf16_and_nowhere_else(t0, tmp_path):
    from triax.checkpoint.released import save_released
    from triax.model.decoder import Decoder

    model = Decoder(t0)
    save_released(model, tmp_path / "f32", dtype=torch.float32)
    found = tensors_of(run(tmp_path / "f32", tmp_path / "bf16", "bf16"))
    save_released(model, tmp_path / "expected")
    expected = tensors_of(tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(same_bytes(found[name], tensor) for name, tensor in expected.items())


def test_layers_become_a_small_model_of_their_own(made, tmp_path):
    folder, tensors = made["kimi_k3"]
    found = tensors_of(run(folder, tmp_path / "cut", "mxfp4", layers=range(1, 4)))
    assert verify(tmp_path / "cut").is_whole
    at = "language_model.model.layers."
    name = "block_sparse_moe.experts.0.w1.weight_packed"
    assert torch.equal(found[f"{at}0.{name}"], tensors[f"{at}1.{name}"])
    cut, part = load_released(tmp_path / "cut"), load_released(folder, layers=range(1, 4))
    assert cut.settings == part.settings
    assert all(torch.equal(tensor, part.state_dict()[key]) for key, tensor in cut.state_dict().items())


def test_f05_keys_that_no_setting_holds_are_kept_whole_or_cut(made, tmp_path):
    folder = shutil.copytree(made["kimi_k3"][0], tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    config["image_placeholder"] = "<|a picture|>"
    config["text_config"] |= {"_name_or_path": "", "add_cross_attention": False, "max_length": 20, "use_cache": True}
    config["vision_config"]["_attn_implementation"] = "flash_attention_2"
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    for name, layers in (("whole", None), ("cut", range(1, 4))):
        run(folder, tmp_path / name, "bf16", layers=layers)
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["image_placeholder"] == "<|a picture|>"
        assert written["text_config"].items() >= {"add_cross_attention": False, "max_length": 20}.items()
        assert written["vision_config"]["_attn_implementation"] == "flash_attention_2"
    assert written["text_config"]["num_hidden_layers"] == 3
    assert verify(tmp_path / "cut").is_whole


def test_what_lies_beside_the_weights_goes_along(made, tmp_path):
    run(made["kimi_k3"][0], tmp_path / "out", "bf16")
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (made["kimi_k3"][0] / name).read_bytes()


@settings(max_examples=5)
@given(shard_bytes=st.integers(1, 10**6))
def test_any_size_of_file_holds_the_same_tensors(made, tmp_path_factory, shard_bytes):
    folder = tmp_path_factory.mktemp("cut")
    found = tensors_of(run(made["kimi_linear"][0], folder / "out", "bf16", shard_bytes=shard_bytes))
    assert all(same_bytes(found[name], tensor) for name, tensor in made["kimi_linear"][1].items())
    shutil.rmtree(folder)


def test_the_source_is_never_changed(made, tmp_path):
    folder = shutil.copytree(made["kimi_k3"][0], tmp_path / "source")
    before = files_of(folder)
    for path in folder.iterdir():
        path.chmod(0o444)
    for to in ("bf16", "mxfp4", "triax"):
        run(folder, tmp_path / to, to)
    assert files_of(folder) == before


# --- interruptions

KILLED = """
import sys, time
from pathlib import Path
from triax.checkpoint.convert import convert
from triax.checkpoint.plan import make_plan
target = Path(sys.argv[2])
plan = make_plan(Path(sys.argv[1]), "bf16", shard_bytes=100_000)
convert(plan, target, report=lambda nbytes: time.sleep(600 if len(list(target.glob("*.safetensors"))) > 2 else 0))
"""


def test_a_killed_conversion_never_looks_whole_and_goes_on_where_it_stopped(made, tmp_path):
    source, target = made["kimi_k3"][0], tmp_path / "killed"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(source), str(target)]) as process:
        deadline = time.monotonic() + 200
        while len(list(target.glob("*.safetensors"))) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    whole = {path.name: path.stat().st_ino for path in target.glob("*.safetensors")}
    assert whole
    assert not (target / "config.json").exists()
    assert not (target / INDEX).exists()
    for reads in (account, verify, load_released):
        with pytest.raises(CheckpointError, match="is not whole"):
            reads(target)
    plan = make_plan(source, "bf16", shard_bytes=100_000)
    assert len(whole) < len(plan.shards)
    skipped = []
    convert(plan, target, skip=skipped.append)
    assert skipped[0] > 0
    assert {name: (target / name).stat().st_ino for name in whole} == whole
    convert(plan, tmp_path / "straight")
    assert files_of(target) == files_of(tmp_path / "straight")


def test_every_file_is_on_the_disk_before_it_has_its_name(made, tmp_path, disk):
    run(made["kimi_k2"][0], tmp_path / "out", "bf16", shard_bytes=100_000)
    disk.check()
    assert {path for path in (tmp_path / "out").iterdir() if path.name.endswith("_config.json")} <= set(disk.synced)


def test_another_conversion_does_not_go_on_with_these_files(made, tmp_path):
    source, target = made["kimi_k3"][0], tmp_path / "out"
    target.mkdir()
    (target / UNFINISHED).write_text(json.dumps({"fingerprint": make_plan(source, "bf16").fingerprint}))
    with pytest.raises(CheckpointError, match="another conversion"):
        convert(make_plan(source, "mxfp4"), target)
    convert(make_plan(source, "bf16"), target)
    assert verify(target).is_whole


def test_the_mark_of_an_unfinished_conversion_goes_last(made, tmp_path, monkeypatch):
    unlink, present = os.unlink, []

    def watched(path, **options):
        if str(path).endswith(UNFINISHED):
            present.extend(one.name for one in (tmp_path / "out").iterdir())
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", watched)
    run(made["kimi_linear"][0], tmp_path / "out", "bf16")
    assert {"config.json", INDEX, "tokenizer_config.json", "generation_config.json"} < set(present)
    assert not [name for name in present if name.endswith(".tmp")]


def test_a_conversion_is_taken_up_only_with_the_same_source_and_options(made, tmp_path):
    """Anything else would leave files of two conversions beside each other."""
    source = shutil.copytree(made["kimi_k3"][0], tmp_path / "source")
    begun = make_plan(source, "bf16", shard_bytes=100_000)
    target = tmp_path / "out"
    target.mkdir()
    (target / UNFINISHED).write_text(json.dumps({"fingerprint": begun.fingerprint}))
    others = [make_plan(source, "bf16", shard_bytes=99_999), make_plan(source, "triax", shard_bytes=100_000)]
    others.append(make_plan(source, "bf16", shard_bytes=100_000, layers=range(2)))
    weights = next(source.glob("*.safetensors"))
    state = weights.stat()
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    others.append(make_plan(source, "bf16", shard_bytes=100_000))
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    config = source / "config.json"
    config.write_text(config.read_text() + "\n")
    others.append(make_plan(source, "bf16", shard_bytes=100_000))
    for plan in others:
        with pytest.raises(CheckpointError, match="another conversion into it was begun"):
            convert(plan, target)
    assert [path.name for path in target.iterdir()] == [UNFINISHED]


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_k2", "kimi_k25"])
def test_what_is_done_in_pieces_is_what_is_done_at_once(miniature, tmp_path, monkeypatch, family):
    """Real weights take many steps of copying, packing and unpacking; those of a miniature must too."""
    sizes = miniature.replace(miniature.toy(family), expert=320, experts=2)
    miniature.write(family, tmp_path / "in", sizes)
    forms = ("bf16", OWN[family], "fp8" if OWN[family] != "fp8" else "int4")
    whole = {to: tensors_of(run(tmp_path / "in", tmp_path / to, to)) for to in forms}
    again = tensors_of(run(tmp_path / "bf16", tmp_path / "again", OWN[family], like=tmp_path / "in"))
    monkeypatch.setattr("triax.checkpoint.convert.COPIED_AT_ONCE", 10_000)
    monkeypatch.setattr("triax.checkpoint.convert.UNPACKED_AT_ONCE", 1)
    for to in forms:
        found = tensors_of(run(tmp_path / "in", tmp_path / f"{to}-pieces", to))
        assert found.keys() == whole[to].keys()
        assert all(same_bytes(found[name], tensor) for name, tensor in whole[to].items())
    found = tensors_of(run(tmp_path / "bf16", tmp_path / "again-pieces", OWN[family], like=tmp_path / "in"))
    assert all(same_bytes(found[name], tensor) for name, tensor in again.items())


def test_the_export_of_an_earlier_conversion_is_not_taken_for_this_one(t0, tmp_path):
    """It may be of another step; only a conversion that goes on finds its own."""
    from triax.checkpoint import sharded
    from triax.checkpoint.export import released_form
    from triax.config import show
    from triax.config.load import Loaded
    from triax.config.train import Recipe, Run
    from triax.data.tokenizer import Tokenizer
    from triax.model.decoder import Decoder

    folder, target = tmp_path / "run", tmp_path / "out"
    folder.mkdir()
    recipe = {"model": t0, "train": Run(tokens=4096), "data": {"tokenizer": {"vocab_size": 270}}}
    (folder / "recipe.json").write_text(json.dumps(show.as_json(Loaded(Recipe.model_validate(recipe), {}, folder))))
    Tokenizer.train(["def f(x):\n    return x\n" * 20], 270).save(folder / "tokenizer.json")
    model = Decoder(t0)
    sharded.save(folder / "checkpoints", 1, {"model": dict(model.state_dict())}, {}, keep=1)
    stale = tmp_path / "out.export"
    stale.mkdir()
    (stale / "config.json").write_text("{}")

    def interrupted():
        with released_form(folder, target) as export:
            assert export == stale
            found = load_released(export).state_dict()
            assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    inode = (stale / "config.json").stat().st_ino
    target.mkdir()
    (target / UNFINISHED).write_text("{}")
    with released_form(folder, target) as taken_up:
        assert (taken_up / "config.json").stat().st_ino == inode
    assert not stale.exists()


def test_two_conversions_into_one_folder_are_refused(made, tmp_path):
    plan = make_plan(made["kimi_linear"][0], "bf16", shard_bytes=100_000)
    begun, go_on = threading.Event(), threading.Event()

    def wait(nbytes):
        begun.set()
        go_on.wait(200)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(convert, plan, tmp_path / "out", report=wait)
        try:
            assert begun.wait(200)
            with pytest.raises(CheckpointError, match="another process is converting"):
                convert(plan, tmp_path / "out")
        finally:
            go_on.set()
        first.result()
    assert verify(tmp_path / "out").is_whole


def test_a_disk_that_is_too_small_is_told_before_a_byte_is_written(miniature, tmp_path):
    """Real widths in a sparse source: more than this disk has."""
    miniature.write_sparse(
        "kimi_k3", tmp_path / "k3", miniature.replace(miniature.FULL["kimi_k3"], layers=20, mla=(3, 19), experts=224)
    )
    plan = make_plan(tmp_path / "k3", "bf16")
    free = shutil.disk_usage(tmp_path).free
    if plan.nbytes < free:
        pytest.skip(f"this disk has {free:,} bytes free, more than the {plan.nbytes:,} that are tried")
    with pytest.raises(CheckpointError, match=rf"too small; found [\d,]+ bytes free where {plan.nbytes + 2**26:,}"):
        convert(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_fault_in_the_source_stops_with_its_place_and_leaves_nothing_that_looks_whole(miniature, tmp_path):
    from safetensors.torch import save_file

    miniature.write("kimi_k3", tmp_path / "k3")
    path = next((tmp_path / "k3").glob("model-00003-*"))
    stored = load_file(path)
    next(tensor for name, tensor in stored.items() if name.endswith("experts.1.w2.weight_scale"))[0, 0] = 255
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=r"experts\.1\.w2\.weight"):
        run(tmp_path / "k3", tmp_path / "out", "bf16")
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(CheckpointError, match="is not whole"):
        verify(tmp_path / "out")


@pytest.mark.parametrize("target", ["kimi_k3", "used"])
def test_folders_in_use_are_never_written_into(made, tmp_path, target):
    folder = shutil.copytree(made["kimi_k3"][0], tmp_path / "kimi_k3")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("keep")
    before = files_of(tmp_path / target)
    with pytest.raises(CheckpointError, match="choose another"):
        run(folder, tmp_path / target, "bf16")
    assert files_of(tmp_path / target) == before


def test_the_source_is_known_by_whatever_path_it_is_named(made, tmp_path):
    source = made["kimi_linear"][0]
    (tmp_path / "link").symlink_to(source)
    for target in (tmp_path / "link", source / ".." / source.name):
        with pytest.raises(CheckpointError, match="is the folder to convert; the source is never changed"):
            run(source, target, "bf16")


def test_columns_that_are_no_whole_groups_are_refused(miniature, tmp_path):
    miniature.write("moonlight", tmp_path / "odd", miniature.replace(miniature.toy("moonlight"), expert=40))
    with pytest.raises(CheckpointError, match="no whole groups of 32"):
        make_plan(tmp_path / "odd", "mxfp4")
    run(tmp_path / "odd", tmp_path / "fp8", "fp8")
    assert verify(tmp_path / "fp8").is_whole


# --- memory

MEASURED = """
import sys
from pathlib import Path
import torch
from triax.checkpoint.convert import convert
from triax.checkpoint.plan import make_plan
torch.set_num_threads(1)
plan = make_plan(Path(sys.argv[1]), sys.argv[3])
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
convert(plan, Path(sys.argv[2]), workers=2)
print(before, peak())
"""


@pytest.mark.parametrize("to", ["bf16", "fp8"])
def test_memory_stays_within_two_tensors_a_worker_and_a_gigabyte(miniature, tmp_path, to):
    """One matrix has 67 MB here, the whole folder three times that; `bf16` copies, `fp8` packs."""
    sizes = miniature.replace(miniature.toy("moonlight"), hidden=1024, dense=32768, layers=2, mla=(0, 1))
    miniature.write("moonlight", tmp_path / "wide", sizes)
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "wide"), str(tmp_path / "out"), to],
        capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    before, peak = (int(word) for word in ran.stdout.split())
    tensor = 32768 * 1024 * 2
    assert peak - before < 2 * 2 * tensor
    assert peak < 2 * 2 * tensor + 2**30


# --- the verb


@pytest.fixture
def triax(capsys):
    """Run one command in this process; give exit status, stdout and stderr."""

    def run(*words):
        try:
            main([str(word) for word in words])
            status = 0
        except SystemExit as end:
            status = end.code or 0
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def test_the_verb_plans_and_converts(triax, made, tmp_path):
    source = made["kimi_k3"][0]
    status, out, _ = triax("convert", source, tmp_path / "out", "--to", "bf16", "--plan")
    assert (status, out) == (0, "plan: 194 tensors, 1,871,360 bytes in 1 files\n")
    assert not (tmp_path / "out").exists()
    assert triax("convert", source, tmp_path / "out", "--to", "bf16", "--layers", "0..2")[0] == 0
    assert load_released(tmp_path / "out").settings.num_layers == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--to", "fp4"], "choose one of bf16, mxfp4"), (["--to", "bf16", "--layers", "3"], "must be A..B")],
)
def test_misuse_has_status_2(triax, made, tmp_path, words, told):
    status, out, err = triax("convert", made["kimi_k3"][0], tmp_path / "out", *words)
    assert (status, out) == (2, "")
    assert told in err
