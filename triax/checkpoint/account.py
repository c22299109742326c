"""Every tensor of a folder of weights held against the inventory, before a value is read."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from triax.checkpoint.collector import held_collector
from triax.checkpoint.forms import Form, can_be_packed, parts
from triax.checkpoint.header import Stored
from triax.checkpoint.names import PREFIX, TensorSpec, accepts, inventory, own_inventory
from triax.checkpoint.published import FAMILIES, Published, read_config
from triax.checkpoint.scan import INDEX, Problems, Scan, refuse_unfinished, scan, some
from triax.checkpoint.vocabulary import check_vocabulary
from triax.config.model import Model
from triax.errors import CheckpointError

__all__ = ["INDEX", "OWN", "Account", "Entry", "Towers", "account", "examine"]

OWN = "triax.json"  # instead of a config.json: the settings of a folder in our own layout

Towers = Literal["all", "text", "vision"]

_ROTARY = re.compile(r"\.rotary_emb\.inv_freq$")  # computed by us, stored in some K2 files
_MEDIA = ("vision_tower.", "mm_projector.")
# transformers 5.24 renames the dense layers' MLP together with the routed ones when it saves kimi_linear.
_DENSE = re.compile(r"^(model\.layers\.\d+)\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")


class Entry(NamedTuple):
    """One weight and the tensors of the files that hold it."""

    spec: TensorSpec
    form: Form
    parts: tuple[Stored, ...]


@dataclass
class Account:
    """What a folder should hold and what it holds."""

    folder: Path
    published: Published
    settings: Model
    """Of what was asked for: with the tower, if it was."""
    layout: Literal["released", "triax"]
    specs: list[TensorSpec]
    entries: dict[str, Entry]
    """By published name (or ours, in our own layout): the weights whose tensors are all there."""
    aside: list[Stored]
    """Tensors that belong to the release and that no model reads: rotary tables, and parts that were not asked for."""
    scan: Scan
    notes: list[str]
    problems: Problems = field(default_factory=lambda: defaultdict(list))

    def check(self) -> None:
        """Refuse the folder if anything is wrong.

        Raises:
            CheckpointError: A tensor is missing, unexpected, there twice, of the wrong shape or dtype, listed but not
                stored, or a file is missing or cut short; the message names them.
        """
        if any(self.problems.values()):
            counts = "; ".join(f"{len(names)} {kind}: {some(names)}" for kind, names in self.problems.items() if names)
            raise CheckpointError(
                f"checkpoint {self.folder}: its tensors are not those of its config; {counts}; "
                "copy the folder again or correct its config"
            )


def account(folder: Path, towers: Towers = "all", needed: Callable[[TensorSpec], bool] | None = None) -> Account:
    """Hold the folder's headers against its config and refuse it if anything is wrong.

    Args:
        folder: A folder in the released layout or in ours.
        towers: Which of text and vision must be there.
        needed: Whether a weight of the whole model must be there; all if not given.

    Raises:
        ConfigError: Its config cannot be used.
        CheckpointError: As `Account.check`.
    """
    found = examine(folder, towers, needed)
    found.check()
    return found


@held_collector()
def examine(folder: Path, towers: Towers = "all", needed: Callable[[TensorSpec], bool] | None = None) -> Account:
    """Hold the folder's headers against its config; what is wrong is listed in `problems`.

    Raises:
        ConfigError: Its config cannot be used.
        CheckpointError: There is nothing to hold against it, or its tokenizer does not fit.
    """
    refuse_unfinished(folder)
    layout = "triax" if (folder / OWN).is_file() else "released"
    published = _own_config(folder) if layout == "triax" else read_config(folder)
    check_vocabulary(folder, published.settings.vocab_size)
    found = scan(folder)
    notes, places = list(published.notes), dict(found.stored)
    settings = published.settings
    if towers != "text" and published.vision is not None:
        settings = settings.model_copy(update={"vision": published.vision})
    aside = _set_aside(places, published, layout, towers)
    named = _plain_names(places, published) if layout == "released" else places
    own_layer = any(name.startswith(("model.multi_token.", "multi_token.")) for name in named)
    if settings.multi_token is not None and not own_layer:
        settings = settings.model_copy(update={"multi_token": None})
        published = published._replace(settings=published.settings.model_copy(update={"multi_token": None}))
        notes.append("the config announces a multi-token layer that the folder does not hold: it is left out")
    if layout == "triax":
        specs = list(own_inventory(settings))
    else:
        specs = list(inventory(settings, published.family, multi_token=own_layer))
    if towers == "vision":
        specs = [spec for spec in specs if spec.ours.startswith("vision.")]
    result = Account(folder, published, settings, layout, specs, {}, aside, found, notes, found.problems)
    if needed is not None:
        result.problems.pop("files of its index are missing", None)
    for spec in specs:
        _claim(spec, named, result, is_needed=needed is None or needed(spec))
    result.problems["unexpected"] += [one.name for candidates in named.values() for one in candidates]
    if aside:
        notes.append(f"{len(aside):,} tensors that this model does not read are left aside")
    return result


def _own_config(folder: Path) -> Published:
    path = folder / OWN
    try:
        table = json.loads(path.read_text(encoding="utf-8-sig"))
        settings = Model.model_validate(table["model"])
        if table["family"] not in FAMILIES:
            raise ValueError(f"unknown family `{table['family']}`")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{path}: does not describe a model; {problem}; convert the folder again") from None
    return Published(table["family"], settings.model_copy(update={"vision": None}), (), settings.vision)


def _claim(spec: TensorSpec, named: dict[str, list[Stored]], result: Account, *, is_needed: bool) -> None:
    """Take the tensors that hold a weight out of `named`, in whichever form they are there."""
    problems, name = result.problems, spec.name.removeprefix(PREFIX)
    plain = named.pop(name, [])
    packed = named.pop(f"{name}_packed", []) if can_be_packed(spec) else []
    if not plain and not packed:
        if is_needed:
            problems["missing"].append(spec.name)
        return
    form: Form = "plain"
    if packed:
        form = "int4" if packed[0].dtype == "I32" else "mxfp4"
    elif plain[0].dtype == "F8_E4M3" and can_be_packed(spec):
        form = "fp8"
    expected = parts(spec, form)
    candidates = [[*plain, *packed]]
    for part in expected[1:]:
        candidates.append(named.pop(part.name.removeprefix(PREFIX), []))
    held = []
    for part, found in zip(expected, candidates, strict=True):
        if not found:
            problems["missing"].append(part.name)
        elif len(found) > 1:
            problems["stored twice"].append(f"{part.name} in {' and '.join(one.path.name for one in found)}")
        else:
            (one,) = found
            held.append(one)
            if not (accepts(spec, one.shape) if form == "plain" else one.shape == part.shape):
                problems["of the wrong shape"].append(f"{one.name} {list(one.shape)}, expected {list(part.shape)}")
            allowed = {"BF16", "F32"} if form == "plain" and part.dtype == "BF16" else {part.dtype}
            if one.dtype not in allowed:
                problems["of the wrong dtype"].append(f"{one.name} {one.dtype}, expected {part.dtype}")
    if len(held) == len(expected):
        result.entries[spec.name] = Entry(spec, form, tuple(held))


def _set_aside(
    places: dict[str, list[Stored]], published: Published, layout: Literal["released", "triax"], towers: Towers
) -> list[Stored]:
    """Take out what belongs to the release and is not asked for."""
    has_tower = published.vision is not None
    vision = ("vision.",) if layout == "triax" else _MEDIA
    aside = []
    for name in list(places):
        is_vision = has_tower and name.startswith(vision)
        unwanted = {"all": False, "text": is_vision, "vision": not is_vision}[towers]
        if unwanted or (layout == "released" and _ROTARY.search(name)):
            aside += places.pop(name)
    return aside


def _plain_names(places: dict[str, list[Stored]], published: Published) -> dict[str, list[Stored]]:
    """Bring the known spellings of a name together."""
    is_hybrid = published.family in ("kimi_k3", "kimi_linear")
    named: dict[str, list[Stored]] = {}
    for name, candidates in places.items():
        plain = name.removeprefix(PREFIX)
        if is_hybrid and "block_sparse_moe" in plain:
            plain = _DENSE.sub(r"\1.mlp.\2", plain)
        named.setdefault(plain, []).extend(candidates)
    return named
