"""`triax checkpoint verify` and `inspect`: every way in which a folder can be wrong, and the figures of a whole one."""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from triax.checkpoint.load import load_released
from triax.checkpoint.scan import INDEX
from triax.checkpoint.verify import verify
from triax.cli.app import main
from triax.errors import CheckpointError

AT = "language_model.model.layers.1."
EXPERT = f"{AT}block_sparse_moe.experts.0.w1.weight"


@pytest.fixture(scope="module")
def made(miniature, tmp_path_factory):
    """Miniatures of K3 and K2, which nobody changes."""
    place = tmp_path_factory.mktemp("verify")
    return {family: (place / family, miniature.write(family, place / family)) for family in ("kimi_k3", "kimi_k2")}


@pytest.fixture
def folder(made, tmp_path):
    """A copy of K3's miniature that a test may damage."""
    return shutil.copytree(made["kimi_k3"][0], tmp_path / "k3")


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


def rewrite(folder, change, number=2):
    """Apply `change` to the tensors of one file and let index and file agree again."""
    path = next(folder.glob(f"model-{number:05d}-*"))
    before = load_file(path)
    tensors = dict(before)
    change(tensors)
    save_file(tensors, path)
    index = json.loads((folder / INDEX).read_text())
    for name in before:
        index["weight_map"].pop(name)
    index["weight_map"] |= dict.fromkeys(tensors, path.name)
    (folder / INDEX).write_text(json.dumps(index))


def problems(folder, **options):
    return {kind: names for kind, names in verify(folder, **options).problems.items() if names}


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_k2"])
@pytest.mark.parametrize("structure", [True, False])
def test_a_whole_folder_is_counted_to_the_byte(made, family, structure):
    folder, tensors = made[family]
    found = verify(folder, structure=structure)
    assert found.is_whole
    assert (found.tensors, found.nbytes) == (len(tensors), sum(tensor.nbytes for tensor in tensors.values()))
    assert found.parameters == sum(weight.numel() for weight in load_released(folder).state_dict().values())


def test_the_verb_prints_a_line_a_class_and_a_summary(triax, made):
    status, out, _ = triax("checkpoint", "verify", made["kimi_k3"][0])
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[:2] for line in lines if line.startswith("experts")] == [["experts", "mxfp4"]]
    assert lines[-1].startswith("whole: kimi_k3, 8 files, 242 tensors, 1,438,208 bytes")
    told = json.loads(triax("checkpoint", "verify", made["kimi_k3"][0], "--json", "--structure")[1])
    assert (told["whole"], told["tensors"], told["structure_only"]) == (True, 242, True)
    assert sum(row["nbytes"] for row in told["classes"]) == told["bytes"]


def test_a_refused_folder_has_status_1_and_a_full_list(triax, folder):
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name])
    status, out, _ = triax("checkpoint", "verify", folder, "--structure")
    assert status == 1
    assert "12 missing:" in out
    for words in (["--structure"], []):
        status, out_json, _ = triax("checkpoint", "verify", folder, "--json", *words)
        assert status == 1
        assert json.loads(out_json)["whole"] is False
        assert len(json.loads(out_json)["problems"]["missing"]) == 12
    assert out.count("experts") >= 12
    assert out.splitlines()[-1].startswith("REFUSED")


def test_u080_missing_extra_and_renamed_tensors_are_told(folder):
    rewrite(
        folder,
        lambda tensors: tensors.update({f"{AT}self_attn.q_prj.weight": tensors.pop(f"{AT}self_attn.q_proj.weight")}),
    )
    assert problems(folder) == {
        "missing": [f"{AT}self_attn.q_proj.weight"],
        "unexpected": [f"{AT}self_attn.q_prj.weight"],
    }


def test_a_tensor_in_two_files_is_told(folder):
    name = f"{AT}self_attn.dt_bias"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(24)}), number=3)
    assert list(problems(folder)) == ["stored twice"]


def test_index_only_and_file_only_tensors_are_told(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][f"{AT}ghost"] = index["weight_map"].pop(f"{AT}self_attn.dt_bias")
    (folder / INDEX).write_text(json.dumps(index))
    found = problems(folder, structure=True)
    assert found["stored but not in the index"] == [f"{AT}self_attn.dt_bias"]
    assert f"{AT}ghost" in found["listed in the index but not stored there"][0]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        (f"{AT}self_attn.A_log", torch.zeros(9, 2), "of the wrong shape"),
        (f"{AT}self_attn.A_log", torch.zeros(8).bfloat16(), "of the wrong dtype"),
        (f"{AT}self_attn.q_proj.weight", torch.ones(24, 160).half(), "of the wrong dtype"),
        (f"{EXPERT}_scale", torch.ones(64, 3), "of the wrong dtype"),
        (f"{EXPERT}_packed", torch.ones(64, 47, dtype=torch.uint8), "of the wrong shape"),
    ],
)
@pytest.mark.parametrize("structure", [True, False])
def test_a_wrong_shape_or_dtype_is_told(folder, name, value, kind, structure):
    rewrite(folder, lambda tensors: tensors.update({name: value}))
    found = problems(folder, structure=structure)
    assert list(found) == [kind]
    assert name in found[kind][0]


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        (f"{EXPERT}_scale", lambda t: t[3, 1].fill_(255), "codes or scales that are no numbers"),
        (f"{EXPERT}_scale", lambda t: t.zero_(), "codes or scales that are no numbers"),
        (f"{EXPERT}_packed", lambda t: t.zero_(), "nothing but zeros"),
        (f"{AT}self_attn.q_proj.weight", lambda t: t.zero_(), "nothing but zeros"),
        (f"{AT}self_attn.q_proj.weight", lambda t: t[5, 7].fill_(float("nan")), "NaN or infinite"),
        (f"{AT}input_layernorm.weight", lambda t: t[0].fill_(float("inf")), "NaN or infinite"),
        (f"{AT}self_attn.A_log", lambda t: t[3].fill_(1e-30), "padding that is not zero"),
    ],
)
def test_u022_numbers_that_no_sound_file_has_are_told(folder, name, change, kind):
    rewrite(folder, lambda tensors: change(tensors[name]))
    found = problems(folder)
    assert list(found) == [kind]
    assert name.removesuffix("_scale") in found[kind][0]
    assert problems(folder, structure=True) == {}


@pytest.mark.parametrize(
    ("family", "name", "change"),
    [
        ("kimi_k3", f"{EXPERT}_scale", lambda t: t[-1, -1].fill_(255)),
        ("kimi_k2", "model.layers.1.mlp.experts.0.up_proj.weight", lambda t: t.view(torch.uint8)[-1].fill_(0x7F)),
        (
            "kimi_k25",
            "language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale",
            lambda t: t[-1, -1].fill_(float("nan")),
        ),
        ("kimi_k3", f"{AT}self_attn.q_proj.weight", lambda t: t[-1, -1].fill_(float("inf"))),
        ("kimi_k3", f"{AT}self_attn.dt_bias", lambda t: t[-1].fill_(float("nan"))),
    ],
)
def test_numbers_are_looked_at_to_the_last_of_a_large_weight(miniature, tmp_path, monkeypatch, family, name, change):
    """Real weights are read in many steps; those of a miniature must too."""
    monkeypatch.setattr("triax.checkpoint.values.ROWS_OF", 1)
    monkeypatch.setattr("triax.checkpoint.verify.READ_AT_ONCE", 4096)
    miniature.write(family, tmp_path / "w", miniature.replace(miniature.toy(family), expert=320, experts=2))
    for number, path in enumerate(sorted((tmp_path / "w").glob("model-*")), 1):
        if name in load_file(path):
            rewrite(tmp_path / "w", lambda tensors: change(tensors[name]), number)
    assert len(problems(tmp_path / "w")) == 1


def test_fp8_codes_that_are_no_numbers_are_told(made, tmp_path):
    folder = shutil.copytree(made["kimi_k2"][0], tmp_path / "k2")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    rewrite(folder, lambda tensors: tensors[name].view(torch.uint8)[1].fill_(0x7F))
    assert list(problems(folder)) == ["codes or scales that are no numbers"]


# --- files


def test_a_file_renamed_after_another_is_told(folder):
    first, second = next(folder.glob("model-00002-*")), next(folder.glob("model-00003-*"))
    first.rename(folder / "swap")
    second.rename(first)
    (folder / "swap").rename(second)
    assert "listed in the index but not stored there" in problems(folder, structure=True)


def test_a_renamed_file_is_told_from_both_sides(folder):
    path = next(folder.glob("model-00002-*"))
    path.rename(folder / "model-2.safetensors")
    found = problems(folder, structure=True)
    assert found["files of its index are missing"] == [path.name]
    assert found["files that the index does not know"] == ["model-2.safetensors"]


@pytest.mark.parametrize("left", [0, 5, 300, -1])
def test_a_half_downloaded_file_is_told_once(folder, left):
    path = next(folder.glob("model-00002-*"))
    path.write_bytes(path.read_bytes()[:left])
    found = problems(folder, structure=True)
    assert len(found["broken files"]) == 1
    assert path.name in found["broken files"][0]
    assert "listed in the index but not stored there" not in found


def test_a_file_with_bytes_behind_its_tensors_is_told(folder):
    path = next(folder.glob("model-00002-*"))
    path.write_bytes(path.read_bytes() + b"\0")
    assert "announces" in problems(folder, structure=True)["broken files"][0]


@pytest.mark.parametrize("place", [*range(8), *range(45, 100, 5)])  # between them lies text that nobody reads
def test_a_bit_flipped_in_a_header_never_passes(folder, place):
    path = next(folder.glob("model-00002-*"))
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << (place % 8)
    path.write_bytes(content)
    assert problems(folder, structure=True)


def test_a_bit_flipped_in_a_tensor_is_told_only_by_its_checksum(folder):
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in folder.glob("*.safetensors")]
    (folder / "SHA256SUMS").write_text("".join(lines))
    assert problems(folder) == {}
    path = next(folder.glob("model-00002-*"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert problems(folder) == {"files with another SHA-256": [path.name]}
    (folder / "SHA256SUMS").unlink()
    assert problems(folder) == {}


def gnu(path, mode=" "):
    return f"{hashlib.sha256(path.read_bytes()).hexdigest()} {mode}{path.name}"


def bsd(path):
    return f"SHA256 ({path.name}) = {hashlib.sha256(path.read_bytes()).hexdigest().upper()}"


@pytest.mark.parametrize("form", [gnu, lambda path: gnu(path, "*"), bsd, lambda path: gnu(path) + "\r"])
def test_f10_each_form_of_a_checksum_is_read(folder, form):
    weights = sorted(folder.glob("*.safetensors"))
    lines = ["# made by a release", "", *map(form, weights), form(folder / "config.json")]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8-sig" if form is bsd else "utf-8")
    assert problems(folder) == {}
    content = bytearray(weights[2].read_bytes())
    content[-100] ^= 1
    weights[2].write_bytes(content)
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    assert problems(folder) == {"files with another SHA-256": [weights[2].name, "config.json"]}


@pytest.mark.parametrize("named", [0, 1, 7])
def test_f10_checksums_that_leave_files_out_vouch_for_nothing(folder, named):
    weights = sorted(folder.glob("*.safetensors"))
    lines = [gnu(folder / "config.json"), *map(gnu, weights[:named])]
    (folder / "SHA256SUMS").write_text("\n".join(lines) if named else "")
    kind = f"files without a checksum (SHA256SUMS names {named} of 8 files)"
    assert problems(folder) == {kind: [path.name for path in weights[named:]]}


@pytest.mark.parametrize(
    "line",
    [
        "d41d8cd98f00b204e9800998ecf8427e  model-00001-of-00008.safetensors",
        "SHA512 (model-00001-of-00008.safetensors) = " + "0" * 128,
        "<html>404</html>",
        "0" * 64,
        "\0\1\2",
    ],
)
def test_f10_a_line_that_is_no_checksum_is_told(folder, line):
    weights = sorted(folder.glob("*.safetensors"))
    (folder / "SHA256SUMS").write_text("\n".join([*map(gnu, weights), line]))
    (kind,) = problems(folder).items()
    assert kind == ("lines of SHA256SUMS that are no checksum of a file", [f"line 9: {line[:80]}"])


def test_f10_a_weight_file_that_only_the_checksums_know_is_told_and_a_readme_is_not(folder):
    lines = [*map(gnu, sorted(folder.glob("*.safetensors"))), "0" * 64 + "  gone.safetensors", "0" * 64 + "  README.md"]
    (folder / "SHA256SUMS").write_text("\n".join(lines))
    assert problems(folder) == {"files of SHA256SUMS are missing": ["gone.safetensors"]}


def test_a_config_that_disagrees_with_the_tensors_is_told(folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    found = problems(folder, structure=True)
    assert set(found) == {"of the wrong shape", "unexpected"}
    assert len(found["unexpected"]) == 4 * 6


def test_an_unfinished_conversion_is_no_checkpoint(folder):
    (folder / "conversion.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not whole"):
        verify(folder)


# --- inspect


def test_inspect_shows_a_line_a_layer_and_the_weights_of_one(triax, made):
    status, out, _ = triax("checkpoint", "inspect", made["kimi_k3"][0])
    assert status == 0
    assert sum(line.startswith("model.layers.") for line in out.splitlines()) == 5
    assert out.splitlines()[-1] == "242 tensors, 1,438,208 bytes"
    told = json.loads(triax("checkpoint", "inspect", made["kimi_k3"][0], "--layer", 1, "--json")[1])
    experts = next(branch for branch in told if branch["name"] == "block_sparse_moe.experts.*.w1.weight")
    assert experts == {
        "name": "block_sparse_moe.experts.*.w1.weight",
        "form": "mxfp4",
        "shape": [64, 96],
        "tensors": 8,
        "nbytes": 4 * (64 * 48 + 64 * 3),
        "parameters": 4 * 64 * 96,
    }


def test_inspect_refuses_a_layer_that_is_not_there(triax, made):
    status, _, err = triax("checkpoint", "inspect", made["kimi_k3"][0], "--layer", 5)
    assert status == 2
    assert "must lie between 0 and 4" in err


# --- the true size, in holes


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear", "kimi_k2", "kimi_k25"])
def test_a_sparse_set_of_two_layers_at_real_widths_is_verified_by_its_headers(miniature, tmp_path, family):
    full = miniature.FULL[family]
    mla = (0, 1) if not full.kda_heads else (1,)
    sizes = replace(full, layers=2, mla=mla, experts=16)
    num_tensors, nbytes = miniature.write_sparse(family, tmp_path / family, sizes)
    found = verify(tmp_path / family, structure=True)
    assert found.is_whole
    assert (found.tensors, found.nbytes) == (num_tensors, nbytes)


@pytest.mark.soak
def test_the_whole_of_k3_is_verified_and_planned_in_three_minutes_and_two_gigabytes(miniature, tmp_path):
    assert miniature.write_sparse("kimi_k3", tmp_path / "k3") == (497_220, 1_560_860_324_864)
    start = time.monotonic()
    program = """
import sys
from triax.cli.app import main
folder = sys.argv[1]
for words in (["checkpoint", "verify", folder, "--structure"], ["convert", folder, "x", "--to", "bf16", "--plan"]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "k3")], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - start < 180
    lines = ran.stdout.splitlines()
    assert "497,220 tensors, 1,560,860,324,864 bytes, 2,779,931,834,976 parameters" in ran.stdout
    assert int(lines[-1]) * 1024 < 2**31
