import bz2
import gzip
import importlib
import json
import lzma
import socket
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from triax.config import data as config
from triax.data.source import Document, read, standard_library, standard_library_files
from triax.errors import DataError


def test_the_standard_library_is_listed_in_order_without_tests_tables_or_installed_packages():
    root = standard_library()
    names = [path.relative_to(root).as_posix() for path in standard_library_files()]
    assert names == sorted(names)
    assert {"argparse.py", "asyncio/base_events.py", "json/decoder.py"} <= set(names)
    forbidden = ("test/", "tests/", "site-packages/", "idle_test/", "encodings/", "pydoc_data/")
    assert not [name for name in names if name.startswith(forbidden) or any(f"/{part}" in name for part in forbidden)]
    assert 3e6 < sum(path.stat().st_size for path in standard_library_files()) < 30e6


def test_a_folder_gives_its_files_in_order_of_name_and_byte_for_byte(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_bytes("né\r\n\u2028".encode())
    (tmp_path / "z.txt").write_text("last")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "other.md").write_text("not asked for")
    found = read(config.Folder(path=tmp_path))
    assert found.documents == (Document("b/a.txt", "né\r\n\u2028"), Document("z.txt", "last"))
    assert found.num_empty == 1


def folder_error(path, **settings) -> str:
    with pytest.raises(DataError) as caught:
        read(config.Folder(path=path, **settings))
    return str(caught.value)


def test_a_missing_folder_is_named(tmp_path):
    assert f"{tmp_path}/none: no such folder" in folder_error(tmp_path / "none")


def test_a_file_given_as_folder_is_told_how_to_be_read(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert f"set path to `{tmp_path}` and pattern to `a.txt`" in folder_error(tmp_path / "a.txt")


def test_a_pattern_without_match_tells_what_is_there(tmp_path):
    (tmp_path / "a.md").write_text("text")
    assert "no file matches `**/*.txt`; found files that end in `.md`" in folder_error(tmp_path)


def test_an_absolute_pattern_is_refused(tmp_path):
    assert "pattern `/etc/*` is not usable" in folder_error(tmp_path, pattern="/etc/*")


def test_a_folder_of_empty_files_has_nothing_to_read(tmp_path):
    (tmp_path / "a.txt").touch()
    assert "found `1` documents, all empty" in folder_error(tmp_path)


def test_files_that_are_not_text_are_named_with_the_offset_of_the_fault(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\x00c")
    (tmp_path / "b.txt").write_bytes("ab é".encode("latin-1"))
    (tmp_path / "c.txt").write_text("good")
    message = folder_error(tmp_path)
    assert "2 of 3 files are not UTF-8 text" in message
    assert f"`{tmp_path}/a.txt` (a NUL byte at offset 2)" in message
    assert f"`{tmp_path}/b.txt` (byte 0xe9 at offset 3)" in message


def test_of_many_bad_files_three_are_named_and_the_rest_counted(tmp_path):
    for n in range(5):
        (tmp_path / f"{n}.txt").write_bytes(b"\xff")
    message = folder_error(tmp_path)
    assert message.count("0xff") == 3
    assert "and 2 more" in message


def test_jsonl_gives_one_document_a_line(tmp_path):
    lines = [{"body": "one\u2028line"}, {"body": ""}, {"body": None}, {"body": "two\n"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    found = read(config.Jsonl(path=tmp_path, field="body"))
    assert found.documents == (Document("a.jsonl:1", "one\u2028line"), Document("a.jsonl:4", "two\n"))
    assert found.num_empty == 2
    assert read(config.Jsonl(path=tmp_path / "a.jsonl", field="body")) == found


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"text": ', "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: not a JSON object; found `list`"),
        ('{"body": "x", "id": 1}', "a.jsonl:2: no field `text`; found `body, id`"),
        ('{"text": 3}', "a.jsonl:2: field `text` is not text; found `int`"),
        (
            '{"text": "ab\\ud800"}',
            "a.jsonl:2: field `text` is not valid Unicode; found a lone surrogate at character 2",
        ),
        ("\udcff", "`{folder}/a.jsonl` (byte 0xff at offset 14)"),
    ],
)
def test_a_bad_line_of_jsonl_is_named_by_file_and_number(tmp_path, line, what):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line + "\n", errors="surrogateescape")
    with pytest.raises(DataError) as caught:
        read(config.Jsonl(path=tmp_path))
    assert what.format(folder=tmp_path) in str(caught.value)


@pytest.mark.parametrize("source", [config.Jsonl, config.Parquet])
def test_a_missing_file_and_a_folder_without_files_are_named(tmp_path, source):
    with pytest.raises(DataError, match=r"no such file or folder"):
        read(source(path=tmp_path / "none"))
    with pytest.raises(DataError, match=f"no `\\*.{source.model_fields['kind'].default}` file in this folder"):
        read(source(path=tmp_path))


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_parquet_gives_one_document_a_row(tmp_path):
    write_parquet(tmp_path / "a.parquet", id=[1, 2, 3], text=["one", None, "é"])
    found = read(config.Parquet(path=tmp_path))
    assert found.documents == (Document("a.parquet:0", "one"), Document("a.parquet:2", "é"))
    assert found.num_empty == 1


def test_parquet_without_the_column_or_with_another_type_or_damaged_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, body=["one"], id=[1])
    with pytest.raises(DataError, match=r"a.parquet: no field `text`; found `body, id`"):
        read(config.Parquet(path=path))
    with pytest.raises(DataError, match=r"row 0: field `id` is not text; found `int`"):
        read(config.Parquet(path=path, field="id"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a.parquet: not a Parquet file"):
        read(config.Parquet(path=path, field="body"))


@pytest.fixture
def data_set(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["one", "", "drei"], "id": [1, 2, 3]})
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    return str(tmp_path / "saved")


def test_a_data_set_saved_by_datasets_is_read(data_set):
    found = read(config.HuggingFace(name=data_set))
    assert found.documents == (Document("train:0", "one"), Document("train:2", "drei"))
    assert found.num_empty == 1


def test_a_data_set_without_the_split_or_field_or_that_is_none_is_named(data_set, tmp_path):
    with pytest.raises(DataError, match=r"no split `test`; found `train`"):
        read(config.HuggingFace(name=data_set, split="test"))
    with pytest.raises(DataError, match=r"no field `body`; found `text, id`"):
        read(config.HuggingFace(name=data_set, field="body"))
    (tmp_path / "plain").mkdir()
    with pytest.raises(DataError, match=r"no data set can be read here"):
        read(config.HuggingFace(name=str(tmp_path / "plain")))


@pytest.mark.parametrize(
    ("library", "source"),
    [("pyarrow", config.Parquet(path="x")), ("datasets", config.HuggingFace(name="x"))],
)
def test_a_missing_optional_library_says_how_to_get_it(monkeypatch, library, source):
    for module in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)  # what Python itself takes for "not there"
    importlib.invalidate_caches()
    with pytest.raises(DataError, match=r"pip install -e '.*\[data\]'"):
        read(source)


ROWS = b'{"text": "one"}\n{"text": "two"}\n'


def compressed(ending: str, data: bytes = ROWS) -> bytes:
    if ending == ".zst":
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()
    return {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[ending](data)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_f28_compressed_jsonl_is_read_and_named_as_the_plain_file(tmp_path, ending):
    (tmp_path / f"a.jsonl{ending}").write_bytes(compressed(ending))
    assert read(config.Jsonl(path=tmp_path)).documents == (Document("a.jsonl:1", "one"), Document("a.jsonl:2", "two"))
    assert read(config.Jsonl(path=tmp_path / f"a.jsonl{ending}")) == read(config.Jsonl(path=tmp_path))


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_f28_joined_and_damaged_compressed_files(tmp_path, ending):
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(compressed(ending) * 2)
    pattern = config.Folder(path=tmp_path, pattern=f"*{ending}")
    assert read(pattern).documents == (Document("a.txt", 2 * ROWS.decode()),)
    path.write_bytes(compressed(ending)[:-5])
    assert "(damaged compressed data: " in folder_error(tmp_path, pattern=f"*{ending}")


def test_f28_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + ROWS + b"\xef\xbb\xbf" + ROWS)
    assert [document.text for document in read(config.Jsonl(path=tmp_path)).documents] == ["one", "two"] * 2
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert read(config.Folder(path=tmp_path)).documents == (Document("a.txt", "one"),)


def test_f28_utf_16_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("one".encode("utf-16"))
    assert f"`{tmp_path}/a.txt` (UTF-16)" in folder_error(tmp_path)


def test_f65_what_is_passed_over_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ROWS + b'{"text": null}\n{"text": ""}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(ROWS))
    (tmp_path / "readme.md").touch()
    found = read(config.Jsonl(path=tmp_path))
    assert [document.name for document in found.documents] == ["a.jsonl:1", "a.jsonl:2"]
    assert found.notes == (
        "`a.jsonl.gz` left out: the same file lies beside it in another form",
        "`readme.md` not read: only files that end in `.jsonl` are",
        "2 of 4 documents are empty or null and are left out",
    )


def test_f65_text_without_oddities_has_no_notes(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ROWS)
    assert read(config.Jsonl(path=tmp_path)).notes == ()


def test_f68_the_name_of_a_builder_without_files_is_no_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"json: no data set can be read here; .* correct name, subset or split"):
        read(config.HuggingFace(name="json"))


def test_a_hub_that_cannot_be_reached_is_told_at_once_and_a_wrong_name_is_not_blamed(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with socket.socket() as taken:  # bound and not listening: refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", tmp_path)
        with pytest.raises(DataError, match=r"some/name: 127\.0\.0\.1 cannot be reached .*; connect this machine"):
            read(config.HuggingFace(name="some/name"))
    assert not datasets.config.HF_HUB_OFFLINE
