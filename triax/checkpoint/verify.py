"""Whether a folder of weights is whole: names, shapes and sizes, and, unless told otherwise, every number."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from triax.checkpoint.account import Account, Entry, Towers, examine
from triax.checkpoint.forms import num_values
from triax.checkpoint.header import mapped
from triax.checkpoint.scan import Problems
from triax.checkpoint.values import check_codes, typed, without_padding
from triax.errors import CheckpointError
from triax.model.count import weights

SUMS = "SHA256SUMS"
# The two forms that `sha256sum` writes and reads, the second with `--tag`.
_GNU = re.compile(r"(?P<escaped>\\?)(?P<sum>[0-9a-fA-F]{64}) [ *](?P<name>.+?)\s*")
_BSD = re.compile(r"(?P<escaped>\\?)SHA256 ?\((?P<name>.+)\) ?= ?(?P<sum>[0-9a-fA-F]{64})\s*")
READ_AT_ONCE = 2**25  # bytes

Report = Callable[[int], None]
"""Told how many bytes of tensors were just looked at."""


class Row(NamedTuple):
    """One class of tensors: a part of the model in one form."""

    part: str
    form: str
    tensors: int
    nbytes: int
    parameters: int


@dataclass(frozen=True)
class Verification:
    """What a folder holds and what is wrong with it."""

    folder: Path
    family: str
    rows: tuple[Row, ...]
    problems: Problems
    notes: tuple[str, ...]
    files: int
    is_structure_only: bool

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not any(self.problems.values())

    @property
    def tensors(self) -> int:
        """Tensors of all classes."""
        return sum(row.tensors for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Their bytes; headers are not counted."""
        return sum(row.nbytes for row in self.rows)

    @property
    def parameters(self) -> int:
        """Weights that they stand for: scales and padding are none."""
        return sum(row.parameters for row in self.rows)


def verify(
    folder: Path,
    *,
    structure: bool = False,
    towers: Towers = "all",
    workers: int = 2,
    report: Report = lambda nbytes: None,
) -> Verification:
    """Hold a folder against its config: index, headers and, unless only the structure is asked for, the numbers.

    Numbers are looked at for what a damaged or half-filled file gives away: NaN, infinity, scales that are no numbers
    or all zero, padding that is not zero, matrices of nothing but zeros. A `SHA256SUMS` beside the weights is held
    against every file that it names, and must name every file of weights.

    Args:
        folder: A folder in the released layout or in ours.
        structure: Look at config, index and headers only.
        towers: Which of text and vision must be there.
        workers: Files looked at together.
        report: Called from the workers with the bytes of tensors that were looked at.

    Raises:
        ConfigError: Its config cannot be used.
        CheckpointError: There is nothing to verify, or the folder is an unfinished conversion.
    """
    ledger = examine(folder, towers)
    total = sum(one.nbytes for places in ledger.scan.stored.values() for one in places)
    told = ledger.scan.index_bytes
    if told is not None and told != total:
        ledger.notes.append(f"the index counts {told:,} bytes; the files hold {total:,}")
    if not structure:
        _look(ledger, workers, report)
        _check_sums(ledger)
    problems = {kind: names for kind, names in ledger.problems.items() if names}
    return Verification(
        folder,
        ledger.published.family,
        tuple(rows(ledger)),
        problems,
        tuple(ledger.notes),
        len(ledger.scan.files),
        structure,
    )


def rows(ledger: Account) -> Iterator[Row]:
    """Count the tensors of each class, in the order of the model."""
    parts = part_names(ledger)
    tensors: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    parameters: Counter[tuple[str, str]] = Counter()
    for entry in ledger.entries.values():
        key = (parts[entry.spec.ours], entry.form)
        tensors[key] += len(entry.parts)
        nbytes[key] += sum(stored.nbytes for stored in entry.parts)
        parameters[key] += num_values(entry.spec)
    for part, form in tensors:
        yield Row(part, form, tensors[part, form], nbytes[part, form], parameters[part, form])
    if ledger.aside:
        yield Row("left aside", "plain", len(ledger.aside), sum(one.nbytes for one in ledger.aside), 0)


def part_names(ledger: Account) -> dict[str, str]:
    """Return the part of the model that each of our tensors belongs to."""
    return {
        weight.name: "projector" if weight.name.startswith("vision.projector.") else weight.part
        for weight in weights(ledger.settings)
    }


def _look(ledger: Account, workers: int, report: Report) -> None:
    by_file: dict[Path, list[Entry]] = {}
    for entry in ledger.entries.values():
        by_file.setdefault(entry.parts[0].path, []).append(entry)
    sound = {id(entry) for entry in ledger.entries.values() if _fits(entry)}

    def look(entries: list[Entry]) -> list[tuple[str, str]]:
        found = []
        for entry in entries:
            if id(entry) in sound:
                found += list(faults(entry))
            report(sum(stored.nbytes for stored in entry.parts))
        return found

    with ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="verify") as pool:
        for found in pool.map(look, by_file.values()):
            for kind, what in found:
                ledger.problems[kind].append(what)


def _fits(entry: Entry) -> bool:
    """Whether shapes and dtypes are such that the numbers can be read; if not, that was told before."""
    if entry.form == "plain":
        return entry.parts[0].dtype in ("BF16", "F32")
    if entry.form == "mxfp4" and any(part.dtype != "U8" for part in entry.parts[:2]):
        return False
    rows = entry.spec.shape[0]
    return entry.parts[0].shape[0] == rows and len(entry.parts[1].shape) == 2


def faults(entry: Entry) -> Iterator[tuple[str, str]]:
    """Give (kind, what) for everything in a weight that no sound file has."""
    if entry.form != "plain":
        try:
            check_codes(entry)
        except CheckpointError as problem:
            yield "codes or scales that are no numbers", str(problem)
        else:
            with mapped(entry.parts[0]) as codes:
                if entry.form == "mxfp4" and not bool((codes & 0x77).any()):
                    yield "nothing but zeros", entry.parts[0].name
        return
    (stored,) = entry.parts
    is_zero = True
    for start in range(0, stored.nbytes, READ_AT_ONCE):
        with mapped(stored, start, min(stored.nbytes, start + READ_AT_ONCE)) as content:
            largest = typed(content, stored.dtype).abs().max()
        if not bool(torch.isfinite(largest)):
            yield "NaN or infinite", stored.name
            return
        is_zero = is_zero and not bool(largest)
    if is_zero and len(entry.spec.held) == 2:
        yield "nothing but zeros", stored.name
    if stored.shape != entry.spec.held:
        try:
            with mapped(stored) as content:
                without_padding(entry.spec, typed(content, stored.dtype), stored)
        except CheckpointError:
            yield "padding that is not zero", stored.name


def _check_sums(ledger: Account) -> None:
    """Hold the files against the folder's checksums, which must name every file of weights."""
    path = ledger.folder / SUMS
    if not path.is_file():
        return
    problems = ledger.problems
    named: set[Path] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _GNU.fullmatch(line) or _BSD.fullmatch(line)
        if found is None:
            problems[f"lines of {SUMS} that are no checksum of a file"].append(f"line {number}: {line[:80]}")
            continue
        file = ledger.folder / _unescaped(found)
        named.add(file)
        if not file.is_file():
            if file.suffix == ".safetensors":  # the rest of a release may be left behind
                problems[f"files of {SUMS} are missing"].append(file.name)
            continue
        with file.open("rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != found["sum"].lower():
                problems["files with another SHA-256"].append(file.name)
    files = ledger.scan.files
    unnamed = [file.name for file in files if file not in named]
    if unnamed:
        kind = f"files without a checksum ({SUMS} names {len(files) - len(unnamed)} of {len(files)} files)"
        problems[kind] += unnamed


def _unescaped(line: re.Match[str]) -> str:
    """Return the name of a line, which escapes its odd characters when it begins with a backslash."""
    if not line["escaped"]:
        return line["name"]
    return re.sub(r"\\([\\nr])", lambda found: {"n": "\n", "r": "\r"}.get(found[1], found[1]), line["name"])
