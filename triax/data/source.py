"""Where documents come from: the standard library, folders, JSONL, Parquet, data sets of `datasets`."""

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from triax.config import data as config
from triax.errors import DataError

EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    | {"pydoc_data"}  # one generated file, a fifteenth of all bytes: the side that holds it would be about little else
    | {"encodings"}  # generated tables, an eighth of all bytes, so alike that a held-out one was learned from its twin
)
EXCLUDED_PREFIX = "_sysconfigdata"  # written by the build of the interpreter: paths of one machine
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


def read(source: config.Source) -> Documents:
    """Read every document of a source.

    Raises:
        DataError: The source is missing, holds something that is not text, or has nothing left to read.
    """
    match source:
        case config.StandardLibrary():
            where, pairs = "the standard library", _read_files(standard_library(), standard_library_files())
        case config.Folder():
            where, pairs = str(source.path), _read_files(*_folder_files(source))
        case config.Jsonl():
            where, pairs = str(source.path), _read_jsonl(source)
        case config.Parquet():
            where, pairs = str(source.path), _read_parquet(source)
        case config.HuggingFace():
            where, pairs = source.name, _read_data_set(source)
    read_all = [Document(name, text) for name, text in pairs]
    documents = tuple(document for document in read_all if document.text)
    num_empty = len(read_all) - len(documents)
    if not documents:
        raise DataError(f"{where}: no text to read; found `{num_empty}` documents, all empty; name a source with text")
    return Documents(documents, num_empty)


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


def _folder_files(source: config.Folder) -> tuple[Path, list[Path]]:
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
    return root, files


def _read_files(root: Path, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    problems = []
    for path in files:
        try:
            yield path.relative_to(root).as_posix(), _text_of(path)
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
    """Return the text of a file byte for byte, line ends included."""
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise DataError(f"`{path}` ({problem.strerror})") from None
    if (offset := raw.find(b"\0")) >= 0:
        raise DataError(f"`{path}` (a NUL byte at offset {offset})")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise DataError(f"`{path}` (byte {raw[problem.start]:#04x} at offset {problem.start})") from None


def _files_of_kind(path: Path, ending: str) -> tuple[Path, list[Path]]:
    path = path.expanduser()
    if path.is_file():
        return path.parent, [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder; found nothing at this path; correct the path of the source")
    if files := _in_order(path, list(path.rglob(f"*{ending}"))):
        return path, files
    raise DataError(f"{path}: no `*{ending}` file in this folder; found none; correct the path of the source")


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


def _read_jsonl(source: config.Jsonl) -> Iterator[tuple[str, str]]:
    root, files = _files_of_kind(source.path, ".jsonl")
    for path in files:
        try:
            lines = _text_of(path).split("\n")  # not splitlines: U+2028 may stand inside a JSON string
        except DataError as problem:
            raise DataError(f"{root}: not UTF-8 text; found {problem}; convert or remove the file") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield (
                    f"{path.relative_to(root).as_posix()}:{number}",
                    _jsonl_text(f"{path}:{number}", line, source.field),
                )


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
            f"data.sources: this kind needs `{module}`; found {problem}; install it with `pip install 'triax[data]'`"
        ) from None


def _read_parquet(source: config.Parquet) -> Iterator[tuple[str, str]]:
    parquet = _extra("pyarrow.parquet")
    root, files = _files_of_kind(source.path, ".parquet")
    for path in files:
        name = path.relative_to(root).as_posix()
        try:
            table = parquet.ParquetFile(path)
        except (OSError, ValueError) as problem:
            raise DataError(f"{path}: not a Parquet file; {problem}; replace or remove it") from None
        with table:
            if source.field not in table.schema_arrow.names:
                raise DataError(f"{path}: {_no_field(source.field, table.schema_arrow.names)}")
            number = 0
            for batch in table.iter_batches(columns=[source.field]):
                for value in batch.column(0).to_pylist():
                    yield f"{name}:{number}", _row_text(f"{path}: row {number}", source.field, value)
                    number += 1


def _read_data_set(source: config.HuggingFace) -> Iterator[tuple[str, str]]:
    datasets = _extra("datasets")
    try:
        if Path(source.name).expanduser().exists():
            found = datasets.load_from_disk(str(Path(source.name).expanduser()))
        else:
            found = datasets.load_dataset(source.name, source.subset or None, split=source.split)
    except (OSError, ValueError, RuntimeError) as problem:
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
