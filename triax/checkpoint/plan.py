"""What a conversion will write, to the byte, before it writes anything."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from triax.checkpoint.account import OWN, Account, Entry, account
from triax.checkpoint.collector import held_collector
from triax.checkpoint.compose import compose
from triax.checkpoint.cut import cut_settings, origin
from triax.checkpoint.forms import FORMS, Form, Part, fits, is_released_as, parts
from triax.checkpoint.header import SIZES, Stored
from triax.checkpoint.names import TensorSpec, inventory, own_inventory
from triax.checkpoint.published import carry
from triax.checkpoint.quantization import announce, announced
from triax.errors import CheckpointError, ConfigError

Target = Literal["bf16", "mxfp4", "fp8", "int4", "triax"]
TARGETS: tuple[Target, ...] = get_args(Target)

SHARD_BYTES = 5 * 10**9
_BESIDE = (".json", ".jinja", ".md", ".model", ".py", ".txt")  # what belongs to a release beside weights
_OWN_FILES = ("config.json", OWN, "SHA256SUMS")


class Piece(NamedTuple):
    """Rows of a stored weight and where they go."""

    entry: Entry
    source_row: int
    target_row: int
    rows: int


class Output(NamedTuple):
    """One weight of the new folder."""

    spec: TensorSpec
    form: Form
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]
    like: Entry | None = None
    """The packed weight whose codes and scales are kept where the values are still its."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(prod(part.shape) * SIZES[part.dtype] for part in self.parts)


class Shard(NamedTuple):
    """One file of the new folder."""

    name: str
    outputs: tuple[Output, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors; the header comes on top."""
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True)
class Plan:
    """A conversion that can be begun, or taken up again."""

    source: Path
    to: Target
    shards: tuple[Shard, ...]
    config_name: str
    config: dict[str, Any]
    beside: tuple[Path, ...]
    """Small files that are copied: tokenizer, generation settings, code."""
    fingerprint: str
    """Of everything that decides what is written; a conversion is only taken up with the same one."""
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def num_tensors(self) -> int:
        """Tensors in all files."""
        return sum(len(output.parts) for shard in self.shards for output in shard.outputs)


@held_collector()
def make_plan(
    source: Path,
    to: Target,
    *,
    layers: range | None = None,
    shard_bytes: int = SHARD_BYTES,
    like: Path | None = None,
) -> Plan:
    """Read the headers of a folder of weights and lay out its conversion.

    Matrices that already have the wanted form keep it and their bytes, and what is plain beside them stays plain;
    otherwise the released set is packed: routed experts (MXFP4, INT4), or all matrices but a few (FP8).

    Args:
        source: A folder in the released layout or in ours.
        to: The form to write.
        layers: Keep only these, renumbered from 0.
        shard_bytes: Size above which the next weight goes to a new file.
        like: Weights in the wanted form that the source came from: the same matrices are packed, and what did not
            change keeps its codes and scales.

    Raises:
        ConfigError: The config cannot be used or has no such layers, or the form has no codes to be like.
        CheckpointError: The folder is not what its config says, or `like` holds another model or form.
    """
    ledger = account(source)
    settings = cut_settings(ledger.settings, layers, None)
    entries = {(entry.spec.ours, entry.spec.index): entry for entry in ledger.entries.values()}
    own_layer = settings.multi_token is not None
    family = ledger.published.family
    specs = own_inventory(settings) if to == "triax" else inventory(settings, family, multi_token=own_layer)
    form: Form = "plain" if to in ("bf16", "triax") else to
    forms = {entry.form for entry in ledger.entries.values()} - {"plain"}
    model = None if like is None else _Like(account(like), form)
    outputs = [_output(spec, entries, layers, form, forms, model) for spec in specs]
    keeps = layers is None and ledger.layout == "released" and to != "triax" and forms == ({form} - {"plain"})
    if keeps:  # the release's rotary tables go along, so that nothing is lost
        outputs += [_copied(stored) for stored in ledger.aside]
    elif model is not None and layers is None:
        outputs += [_copied(stored) for stored in model.ledger.aside]
    shards = _named(_cut(outputs, shard_bytes))
    name, config = _config(ledger, settings.model_dump(mode="json"), to, layers, forms)
    if to != "triax":
        packed = [output.spec for output in outputs if output.form != "plain"]
        plain = [output.spec for output in outputs if output.form == "plain"]
        told_by = like if like is not None else source if form in forms and ledger.layout == "released" else None
        kept = None if told_by is None else announced(_read_json(told_by / "config.json"))
        announce(config, form, packed, plain, kept)
        _tell_dtype(config, next((one for one in outputs if one.spec.ours == "embed.weight"), outputs[0]))
    beside = [path for path in sorted(source.iterdir()) if _goes_along(path)]
    return Plan(
        source,
        to,
        shards,
        name,
        config,
        tuple(beside),
        _fingerprint(ledger, to, layers, shard_bytes, model),
        (*ledger.notes, *_rounding(outputs)),
    )


class _Like:
    """Weights whose codes and scales are kept where nothing changed."""

    def __init__(self, ledger: Account, form: Form) -> None:
        if form == "plain":
            raise ConfigError(
                f"--like: keeps codes and scales; found a form without them; leave it out or convert to "
                f"{', '.join(FORMS[1:])}"
            )
        found = sorted({entry.form for entry in ledger.entries.values()} - {"plain"})
        if ledger.layout != "released" or found != [form]:
            raise CheckpointError(
                f"{ledger.folder}: holds no weights in {form} to be like; found {', '.join(found) or 'plain ones'}; "
                "name the release that the weights came from"
            )
        self.ledger = ledger
        self.entries = {(entry.spec.ours, entry.spec.index): entry for entry in ledger.entries.values()}

    def of(self, spec: TensorSpec, ours: str) -> Entry | None:
        """Return the weight; none for the extra prediction layer, which releases leave out."""
        entry = self.entries.get((ours, spec.index))
        if ours.startswith("multi_token.") and entry is None:
            return None
        if entry is None or entry.spec.held != spec.held:
            found = "none" if entry is None else f"{list(entry.spec.held)} where {list(spec.held)} is needed"
            raise CheckpointError(
                f"{self.ledger.folder}: is another model; found for {spec.name} {found}; "
                "name the release that the weights came from"
            )
        return entry


def _rounding(outputs: list[Output]) -> Iterator[str]:
    """Tell that packing plain weights anew does not give a release's bytes back."""
    rounded = [one for one in outputs if one.form != "plain" and one.form != one.pieces[0].entry.form]
    if rounded and not any(one.like for one in rounded):
        yield (
            f"{len(rounded):,} weights are rounded to {rounded[0].form} under scales of their own; if they came from a "
            "release in that form, `--like RELEASE` keeps its bytes where they did not change"
        )


def _output(
    spec: TensorSpec,
    entries: dict[tuple[str, int | None], Entry],
    layers: range | None,
    form: Form,
    forms: set[Form],
    model: _Like | None,
) -> Output:
    ours = origin(spec.ours, layers)
    whole = entries.get((ours, spec.index))
    if whole is not None:
        pieces = (Piece(whole, 0, 0, prod(spec.shape[:-1])),)
    elif spec.index is not None:  # ours is a stack, theirs one by one
        rows = spec.shape[0]
        pieces = (Piece(entries[ours, None], spec.index * rows, 0, rows),)
    else:
        rows = spec.shape[1]
        pieces = tuple(Piece(entries[ours, expert], 0, expert * rows, rows) for expert in range(spec.shape[0]))
    found = pieces[0].entry.form
    like = None if model is None else model.of(spec, ours)
    if like is not None:
        wanted = like.form
        if wanted == "plain":  # in the shape and dtype that it had
            spec = spec._replace(shape=like.parts[0].shape, dtype=like.parts[0].dtype)
    elif form == "plain" or found == form:
        wanted = form
    else:
        wanted = form if is_released_as(spec, form) and not (found == "plain" and form in forms) else "plain"
    if not fits(spec, wanted):
        raise CheckpointError(
            f"{spec.name}: {spec.shape[1]} columns are no whole groups of 32, which {wanted} needs; "
            "convert to bf16 or fp8"
        )
    if wanted == "plain" and spec.ours.endswith(".balance_bias") and pieces[0].entry.parts[0].dtype == "F32":
        spec = spec._replace(dtype="F32")  # rounding would let other experts be chosen
    return Output(spec, wanted, parts(spec, wanted), pieces, like if wanted != "plain" else None)


def _copied(stored: Stored) -> Output:
    spec = TensorSpec(stored.name, stored.shape, stored.dtype, "", None, stored.shape)
    return Output(spec, "plain", parts(spec, "plain"), (Piece(Entry(spec, "plain", (stored,)), 0, 0, 1),))


def _cut(outputs: list[Output], shard_bytes: int) -> Iterator[tuple[Output, ...]]:
    shard: list[Output] = []
    room = shard_bytes
    for output in outputs:
        size = output.nbytes
        if shard and size > room:
            yield tuple(shard)
            shard, room = [], shard_bytes
        shard.append(output)
        room -= size
    yield tuple(shard)


def _named(cut: Iterator[tuple[Output, ...]]) -> tuple[Shard, ...]:
    shards = list(cut)
    return tuple(
        Shard(f"model-{number:05d}-of-{len(shards):06d}.safetensors", outputs)
        for number, outputs in enumerate(shards, start=1)
    )


def _config(
    ledger: Account, tree: dict[str, Any], to: Target, layers: range | None, forms: set[Form]
) -> tuple[str, dict[str, Any]]:
    if to == "triax":
        return OWN, {"format": 1, "family": ledger.published.family, "model": tree}
    if ledger.layout == "released" and layers is None:
        return "config.json", _read_json(ledger.folder / "config.json")
    settings = type(ledger.settings).model_validate(tree)
    if ledger.layout != "released":
        return "config.json", compose(settings, ledger.published.family)
    theirs = _read_json(ledger.folder / "config.json")
    text = theirs.get("text_config", theirs)
    ids = {name: theirs.get(name, text.get(name)) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = compose(settings, ledger.published.family, token_ids=ids)
    carry(config, theirs)
    return "config.json", config


def _tell_dtype(config: dict[str, Any], embedding: Output) -> None:
    """Let a config name the dtype that its plain weights have now, wherever it names one."""
    dtype = {"BF16": "bfloat16", "F32": "float32"}.get(embedding.parts[0].dtype)
    for name in ("dtype", "torch_dtype"):
        if dtype is not None and config.get(name) is not None:
            config[name] = dtype
    for inner in ("text_config", "vision_config"):
        if isinstance(config.get(inner), dict):
            _tell_dtype(config[inner], embedding)


def _goes_along(path: Path) -> bool:
    is_index = path.name.endswith(".safetensors.index.json")
    known = path.suffix in _BESIDE or path.name in ("LICENSE", "LICENCE", "THIRD_PARTY_NOTICES")
    return path.is_file() and known and not is_index and path.name not in _OWN_FILES and not path.name.startswith(".")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8-sig"))


def _fingerprint(ledger: Account, to: Target, layers: range | None, shard_bytes: int, like: _Like | None) -> str:
    told: list[Any] = [to, str(layers), shard_bytes]
    for one in (ledger, *((like.ledger,) if like else ())):
        config = one.folder / (OWN if one.layout == "triax" else "config.json")
        told.append(hashlib.sha256(config.read_bytes()).hexdigest())
        for path in one.scan.files:
            state = path.stat()
            told.append([path.name, state.st_size, state.st_mtime_ns])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
