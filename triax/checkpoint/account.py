"""Every tensor of a released folder held against the inventory, before a value is read."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from triax.checkpoint.names import PREFIX, TensorSpec, accepts, inventory
from triax.checkpoint.published import Published, read_config
from triax.checkpoint.vocabulary import check_vocabulary
from triax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
NAMED = 4  # tensors that a message names before it only counts

_QUANTIZED = re.compile(r"\.(weight_packed|weight_scale|weight_scale_inv|weight_shape)$")
_ROTARY = re.compile(r"\.rotary_emb\.inv_freq$")  # computed by us, stored in some K2 files
_MEDIA = ("vision_tower.", "mm_projector.")
# transformers 5.24 renames the dense layers' MLP together with the routed ones when it saves kimi_linear.
_DENSE = re.compile(r"^(model\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")


class Stored(NamedTuple):
    """One tensor of a file, as its header tells."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Account:
    """A released folder whose tensors all are what the config says."""

    folder: Path
    published: Published
    specs: list[TensorSpec]
    stored: dict[str, Stored]
    """Where each published name lies."""
    notes: list[str] = field(default_factory=list)
    """What was left aside."""


def account(folder: Path) -> Account:
    """Hold the folder's headers against its config.

    Raises:
        ConfigError: Its config cannot be used.
        CheckpointError: A tensor is missing, unexpected, there twice, of the wrong shape or dtype, listed but not
            stored, or a file is missing or cut short; the message names them.
    """
    published = read_config(folder)
    check_vocabulary(folder, published.settings.vocab_size)
    problems: dict[str, list[str]] = defaultdict(list)
    headers = _headers(folder, problems)
    notes = list(published.notes)
    quantized = [name for name in headers if _QUANTIZED.search(name)]
    if quantized:
        raise CheckpointError(
            f"checkpoint {folder}: quantised weights cannot be read yet; found {_some(quantized)}; "
            "convert the folder to plain BF16 weights first"
        )
    found = _without_ignored(headers, published, notes)
    settings = published.settings
    own_layer = any(name.startswith("model.multi_token.") for name in found)
    if settings.multi_token is not None and not own_layer:
        settings = settings.model_copy(update={"multi_token": None})
        published = published._replace(settings=settings)
        notes.append("the config announces a multi-token layer that the folder does not hold: it is left out")
    specs = list(inventory(settings, published.family, multi_token=own_layer))
    stored = {}
    for spec in specs:
        name = spec.name.removeprefix(PREFIX)
        candidates = found.pop(name, [])
        if not candidates:
            problems["missing"].append(spec.name)
        elif len(candidates) > 1:
            problems["stored twice"].append(f"{spec.name} in {' and '.join(one.path.name for one in candidates)}")
        else:
            (one,) = candidates
            stored[spec.name] = one
            if not accepts(spec, one.shape):
                problems["of the wrong shape"].append(f"{one.name} {list(one.shape)}, expected {list(spec.shape)}")
            if one.dtype not in ({"F32"} if spec.dtype == "F32" else {"BF16", "F32"}):
                problems["of the wrong dtype"].append(f"{one.name} {one.dtype}, expected {spec.dtype}")
    problems["unexpected"] += [one.name for candidates in found.values() for one in candidates]
    if any(problems.values()):
        counts = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise CheckpointError(
            f"checkpoint {folder}: its tensors are not those of its config.json; {counts}; "
            "copy the folder again or correct its config"
        )
    return Account(folder, published, specs, stored, notes)


def open_file(path: Path, stack: ExitStack) -> Any:
    """Open a safetensors file for as long as the stack lives.

    Raises:
        CheckpointError: It is not there, cut short or not such a file.
    """
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as problem:
        size = f"{path.stat().st_size:,} bytes" if path.is_file() else "no file"
        raise CheckpointError(
            f"{path}: cut short or not a safetensors file; found {size} ({problem}); copy it again"
        ) from None


def _headers(folder: Path, problems: dict[str, list[str]]) -> dict[str, list[Stored]]:
    """Read the names, shapes and dtypes of all files, and hold them against the index if there is one."""
    files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    listed = _index(folder)
    if not files and not listed:
        raise CheckpointError(f"checkpoint {folder}: holds no weights; found no *.safetensors file; copy them there")
    absent = sorted({file for file in listed.values() if file not in files})
    if absent:
        raise CheckpointError(
            f"checkpoint {folder}: {len(absent)} files of its index are missing: {_some(absent)}; copy them there"
        )
    headers: dict[str, list[Stored]] = defaultdict(list)
    for path in files.values():
        with ExitStack() as stack:
            file = open_file(path, stack)
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                part = file.get_slice(name)
                headers[name].append(Stored(path, name, tuple(part.get_shape()), part.get_dtype()))
    for name, file in listed.items():
        if all(one.path.name != file for one in headers.get(name, [])):
            problems["listed in the index but not stored there"].append(f"{name} in {file}")
    if listed:
        problems["stored but not in the index"] += [name for name in headers if name not in listed]
    return headers


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{path}: is not an index of weights; {problem!r}; copy it again") from None
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{path}: `weight_map` must map tensors to files; found another form; copy it again")
    return listed


def _without_ignored(
    headers: Mapping[str, list[Stored]], published: Published, notes: list[str]
) -> dict[str, list[Stored]]:
    """Drop what the text model does not use and bring the known spellings of a name together."""
    found: dict[str, list[Stored]] = defaultdict(list)
    media = published.family in ("kimi_k3", "kimi_k25")
    dropped = 0
    for name, candidates in headers.items():
        if (media and name.startswith(_MEDIA)) or _ROTARY.search(name):
            dropped += 1
            continue
        plain = name.removeprefix(PREFIX)
        if published.family in ("kimi_k3", "kimi_linear"):
            plain = _DENSE.sub(r"\1.mlp.\2", plain)
        found[plain] += candidates
    if dropped:
        notes.append(f"{dropped} tensors of vision or rotary tables are left aside")
    return found


def _some(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(f"`{name}`" for name in names[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown
