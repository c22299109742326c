"""Where documents come from: the standard library, folders, JSONL, Parquet, data sets of `datasets`."""

import bz2
import gzip
import json
import lzma
import os
import socket
import sysconfig
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from triax.config import data as config
from triax.errors import DataError
from triax.machine import install_command

EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    | {"pydoc_data"}  # one generated file, a fifteenth of all bytes: the side that holds it would be about little else
    | {"encodings"}  # generated tables, an eighth of all bytes, so alike that a held-out one was learned from its twin
)
EXCLUDED_PREFIX = "_sysconfigdata"  # written by the build of the interpreter: paths of one machine
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
BYTE_ORDER_MARK = "\ufeff"  # an editor's signature, no part of the text
REACH_S = 3.0  # how long the hub of `datasets` may take to answer
NAMED_PROBLEMS = 3  # bad files that an error spells out; the rest are counted


class Document(NamedTuple):
    """One text and the name it is known by; the name decides on which side of the held-out split it falls."""

    name: str
    text: str


class Documents(NamedTuple):
    """What one source holds, in the order of its names or rows."""

    documents: tuple[Document, ...]
    num_empty: int
    """Files or rows without text, left out."""
    notes: tuple[str, ...] = ()
    """What was passed over, one line each."""


def read(source: config.Source) -> Documents:
    """Read every document of a source.

    Raises:
        DataError: The source is missing, holds something that is not text, or has nothing left to read.
    """
    notes: tuple[str, ...] = ()
    match source:
        case config.StandardLibrary():
            where, pairs = "the standard library", _read_files(standard_library(), standard_library_files())
        case config.Folder():
            root, files, notes = _folder_files(source)
            where, pairs = str(source.path), _read_files(root, files)
        case config.Jsonl():
            root, files, notes = _files_of_kind(source.path, ".jsonl")
            where, pairs = str(source.path), _read_jsonl(root, files, source.field)
        case config.Parquet():
            _extra("pyarrow.parquet")  # said before anything is looked for
            root, files, notes = _files_of_kind(source.path, ".parquet")
            where, pairs = str(source.path), _read_parquet(root, files, source.field)
        case config.HuggingFace():
            where, pairs = source.name, _read_data_set(source)
    read_all = [Document(name, text) for name, text in pairs]
    documents = tuple(document for document in read_all if document.text)
    num_empty = len(read_all) - len(documents)
    if not documents:
        raise DataError(f"{where}: no text to read; found `{num_empty}` documents, all empty; name a source with text")
    if num_empty and not isinstance(source, config.StandardLibrary):  # its empty files say nothing of one's own text
        notes = (*notes, f"{num_empty} of {len(read_all)} documents are empty or null and are left out")
    return Documents(documents, num_empty, notes)


def standard_library() -> Path:
    """Return the folder of the standard library that runs this program."""
    return Path(sysconfig.get_paths()["stdlib"])


def standard_library_files() -> list[Path]:
    """Return its source files in order of name, without tests, generated tables and installed packages."""
    root = standard_library()
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in EXCLUDED_FOLDERS]
        files += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(EXCLUDED_PREFIX)]
    if not files:
        raise DataError(
            f"{root}: this Python keeps no sources of its standard library; found no `*.py`; "
            "set data.sources to a folder of text"
        )
    return _in_order(root, files)


def _in_order(root: Path, files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _name(root: Path, path: Path) -> str:
    """Return what a file is known by; compressing it does not move it to the other side of the held-out split."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).relative_to(root).as_posix()


def _without_twins(root: Path, files: Sequence[Path]) -> tuple[list[Path], tuple[str, ...]]:
    """Leave out a compressed file that lies beside the same file in another form."""
    chosen: dict[str, Path] = {}
    for path in sorted(files, key=lambda path: path.suffix in COMPRESSED):
        chosen.setdefault(_name(root, path), path)
    kept = set(chosen.values())
    twins = [path.relative_to(root).as_posix() for path in files if path not in kept]
    note = f"{_some(twins)} left out: the same file lies beside it in another form"
    return [path for path in files if path in kept], (note,) if twins else ()


def _some(names: Sequence[str]) -> str:
    """Name a few and count the rest."""
    more = len(names) - NAMED_PROBLEMS
    return ", ".join(f"`{name}`" for name in names[:NAMED_PROBLEMS]) + (f" and {more} more" if more > 0 else "")


def _folder_files(source: config.Folder) -> tuple[Path, list[Path], tuple[str, ...]]:
    root = source.path.expanduser()
    if root.is_file():
        raise DataError(
            f"{root}: a source of kind `folder` reads a folder; found a file; "
            f"set path to `{root.parent}` and pattern to `{root.name}`"
        )
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; found nothing at this path; correct the path of the source")
    try:
        files = _in_order(root, [path for path in root.glob(source.pattern) if path.is_file()])
    except (ValueError, NotImplementedError) as problem:
        raise DataError(
            f"{root}: pattern `{source.pattern}` is not usable; {problem}; use a relative glob such as `**/*.txt`"
        ) from None
    if not files:
        endings = sorted({path.suffix for path in root.rglob("*") if path.is_file()})[:8]
        raise DataError(
            f"{root}: no file matches `{source.pattern}`; found files that end in `{', '.join(endings) or 'nothing'}`; "
            "change the pattern of the source"
        )
    return root, *_without_twins(root, files)


def _read_files(root: Path, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    problems = []
    for path in files:
        try:
            yield _name(root, path), _text_of(path)
        except DataError as problem:
            problems.append(str(problem))
    if problems:
        more = len(problems) - NAMED_PROBLEMS
        raise DataError(
            f"{root}: {len(problems)} of {len(files)} files are not UTF-8 text; found "
            + ", ".join(problems[:NAMED_PROBLEMS])
            + (f" and {more} more" if more > 0 else "")
            + "; convert or remove them, or narrow the pattern of the source"
        )


def _text_of(path: Path) -> str:
    """Return the text of a file byte for byte, line ends included; without compression and byte-order mark."""
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise DataError(f"`{path}` ({problem.strerror})") from None
    raw = _decompressed(path, raw)
    if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise DataError(f"`{path}` (UTF-16)")
    if (offset := raw.find(b"\0")) >= 0:
        raise DataError(f"`{path}` (a NUL byte at offset {offset})")
    try:
        return raw.decode("utf-8").removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as problem:
        raise DataError(f"`{path}` (byte {raw[problem.start]:#04x} at offset {problem.start})") from None


def _decompressed(path: Path, raw: bytes) -> bytes:
    """Return what a compressed file holds, known by its first bytes; other bytes unchanged.

    None of these beginnings is UTF-8 text but that of bzip2, which has ten letters.
    """
    beginnings: dict[bytes, Callable[[bytes], bytes]] = {
        b"\x1f\x8b": gzip.decompress,
        b"\xfd7zXZ\0": lzma.decompress,
        b"\x28\xb5\x2f\xfd": _zstd,
    }
    if raw[:3] == b"BZh" and raw[4:10] == b"1AY&SY":
        beginnings[raw[:10]] = bz2.decompress
    for beginning, decompress in beginnings.items():
        if raw.startswith(beginning):
            try:
                return decompress(raw)
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as problem:
                raise DataError(f"`{path}` (damaged compressed data: {problem})") from None
    return raw


def _zstd(raw: bytes) -> bytes:
    arrow = _extra("pyarrow")
    with arrow.CompressedInputStream(arrow.BufferReader(raw), "zstd") as stream:
        return stream.read()


def _files_of_kind(path: Path, ending: str) -> tuple[Path, list[Path], tuple[str, ...]]:
    """Return the files of a path with this ending, compressed ones included, and what else lies there."""
    path = path.expanduser()
    if path.is_file():
        return path.parent, [path], ()
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder; correct the path of the source")
    there = _in_order(path, [file for file in path.rglob("*") if file.is_file()])
    files = [file for file in there if _name(path, file).endswith(ending)]
    if not files:
        raise DataError(f"{path}: no `*{ending}` file in this folder; correct the path of the source")
    others = [file.relative_to(path).as_posix() for file in there if file not in files and file.name[0] != "."]
    files, notes = _without_twins(path, files)
    if others:
        notes = (*notes, f"{_some(others)} not read: only files that end in `{ending}` are")
    return path, files, notes


def _row_text(where: str, field: str, value: object) -> str:
    """Return the text of a row; a null is an empty text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: field `{field}` is not text; found `{type(value).__name__}`; choose a text field")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as problem:
        raise DataError(
            f"{where}: field `{field}` is not valid Unicode; found a lone surrogate at character {problem.start}; "
            "repair or remove this row"
        ) from None
    return value


def _read_jsonl(root: Path, files: Sequence[Path], field: str) -> Iterator[tuple[str, str]]:
    for path in files:
        try:
            lines = _text_of(path).split("\n")  # not splitlines: U+2028 may stand inside a JSON string
        except DataError as problem:
            raise DataError(f"{root}: not UTF-8 text; found {problem}; convert or remove the file") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                text = line.removeprefix(BYTE_ORDER_MARK)  # files with marks may have been joined
                yield f"{_name(root, path)}:{number}", _jsonl_text(f"{path}:{number}", text, field)


def _jsonl_text(where: str, line: str, field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{where}: not JSON; {problem}; repair or remove this line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object; found `{type(row).__name__}`; write one object a line")
    if field not in row:
        raise DataError(f"{where}: {_no_field(field, list(row))}")
    return _row_text(where, field, row[field])


def _no_field(field: str, present: list[str]) -> str:
    return f"no field `{field}`; found `{', '.join(present) or 'none'}`; set field of the source to one of them"


def _extra(module: str) -> Any:
    """Return a module of an optional library, or say how to get it."""
    try:
        return import_module(module)
    except ImportError as problem:
        raise DataError(
            f"data.sources: this kind needs `{module}`; found {problem}; install it with `{install_command('data')}`"
        ) from None


def _read_parquet(root: Path, files: Sequence[Path], field: str) -> Iterator[tuple[str, str]]:
    parquet = _extra("pyarrow.parquet")
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            table = parquet.ParquetFile(path)
        except (OSError, ValueError) as problem:
            raise DataError(f"{path}: not a Parquet file; {problem}; replace or remove it") from None
        with table:
            if field not in table.schema_arrow.names:
                raise DataError(f"{path}: {_no_field(field, table.schema_arrow.names)}")
            number = 0
            for batch in table.iter_batches(columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield f"{name}:{number}", _row_text(f"{path}: row {number}", field, value)
                    number += 1


class HubUnreachable(Exception):
    """The hub does not answer and the cache does not help."""


@contextmanager
def _offline_without_network() -> Generator[None]:
    """Let `datasets` look into its cache at once where its hub cannot be reached; it would try for half a minute."""
    from datasets import config as settings
    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    refused = None
    if not constants.HF_HUB_OFFLINE:
        try:
            port = place.port or (80 if place.scheme == "http" else 443)
            socket.create_connection((place.hostname or "", port), timeout=REACH_S).close()
        except OSError as problem:
            refused = problem
    if refused is None:
        yield
        return
    before = constants.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE = True
    try:
        yield
    except ConnectionError:
        raise HubUnreachable(f"{place.hostname} cannot be reached ({refused})") from None
    finally:
        constants.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE = before


def _read_data_set(source: config.HuggingFace) -> Iterator[tuple[str, str]]:
    datasets = _extra("datasets")
    try:
        if Path(source.name).expanduser().exists():
            found = datasets.load_from_disk(str(Path(source.name).expanduser()))
        else:
            with _offline_without_network():
                found = datasets.load_dataset(source.name, source.subset or None, split=source.split)
    except HubUnreachable as problem:
        raise DataError(
            f"{source.name}: {problem}, and no copy of the data set is in its cache; connect this machine, or name a "
            "folder that `save_to_disk` wrote"
        ) from None
    except Exception as problem:  # the library raises whatever the code of a data set raises
        raise DataError(
            f"{source.name}: no data set can be read here; {problem}; correct name, subset or split of the source"
        ) from None
    if isinstance(found, datasets.DatasetDict):
        if source.split not in found:
            raise DataError(
                f"{source.name}: no split `{source.split}`; found `{', '.join(found)}`; set split of the source"
            )
        found = found[source.split]
    if source.field not in found.column_names:
        raise DataError(f"{source.name}: {_no_field(source.field, found.column_names)}")
    for number, value in enumerate(found[source.field]):
        name = f"{source.split}:{number}"
        yield name, _row_text(f"{source.name} {name}", source.field, value)
