"""What the files and the index of a folder of weights say they hold."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from triax.checkpoint.header import Stored, read_header
from triax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
UNFINISHED = "conversion.json"  # lies in a folder as long as a conversion into it goes on
NAMED = 4  # tensors that a message names before it only counts

Problems = dict[str, list[str]]


@dataclass
class Scan:
    """The headers of a folder, as they are."""

    folder: Path
    files: list[Path]
    stored: dict[str, list[Stored]]
    """Every place of each name."""
    listed: dict[str, str]
    """File of each name by the index; empty without one."""
    index_bytes: int | None = None
    """Bytes of all tensors by the index, if it tells."""
    absent: list[str] = field(default_factory=list)
    """Files that only the index knows."""
    problems: Problems = field(default_factory=lambda: defaultdict(list))


def refuse_unfinished(folder: Path) -> None:
    """Refuse a folder into which a conversion goes on, or did when it was killed.

    Raises:
        CheckpointError: It is such a folder.
    """
    if (folder / UNFINISHED).exists():
        raise CheckpointError(
            f"{folder}: is not whole; found `{UNFINISHED}` of a conversion that has not ended; "
            "run the same conversion again to finish it"
        )


def scan(folder: Path) -> Scan:
    """Read every header and the index, and hold them against each other.

    Raises:
        CheckpointError: There is nothing to read, or the index is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    listed, index_bytes = _index(folder)
    if not files and not listed:
        raise CheckpointError(f"checkpoint {folder}: holds no weights; found no *.safetensors file; copy them there")
    found = Scan(folder, files, defaultdict(list), listed, index_bytes)
    problems = found.problems
    names = {path.name for path in files}
    found.absent = sorted({file for file in listed.values() if file not in names})
    problems["files of its index are missing"] += found.absent
    broken = set()
    for path in files:
        try:
            for one in read_header(path):
                found.stored[one.name].append(one)
        except CheckpointError as problem:
            problems["broken files"].append(str(problem))
            broken.add(path.name)
    gone = broken | set(found.absent)  # told once, not once a tensor
    for name, file in listed.items():
        if file not in gone and all(one.path.name != file for one in found.stored.get(name, ())):
            problems["listed in the index but not stored there"].append(f"{name} in {file}")
    if listed:
        problems["stored but not in the index"] += [name for name in found.stored if name not in listed]
        used = set(listed.values())
        problems["files that the index does not know"] += [name for name in sorted(names) if name not in used]
    return found


def _index(folder: Path) -> tuple[dict[str, str], int | None]:
    path = folder / INDEX
    if not path.is_file():
        return {}, None
    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"))
        listed, told = table["weight_map"], table.get("metadata", {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{path}: is not an index of weights; {problem!r}; copy it again") from None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{path}: `weight_map` must map tensors to files; found another form; copy it again")
    return listed, int(told) if isinstance(told, int | float) else None


def some(names: Iterable[str]) -> str:
    """Name the first few and count the rest."""
    names = list(names)
    shown = ", ".join(f"`{name}`" for name in names[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown
