"""What a decoder holds and what a token costs, from its settings alone: no tensor is allocated."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal, NamedTuple

from triax.config.model import Kda, Mla, Model, Moe
from triax.model.vision_count import vision_weights

Part = Literal[
    "embedding",
    "head",
    "attention",
    "dense",
    "router",
    "latent",
    "experts",
    "shared",
    "mixing",
    "norms",
    "multi_token",
    "vision",
]

CHUNK = 64  # tokens that a KDA kernel handles at once; sets the quadratic term of its cost


class Weight(NamedTuple):
    """One tensor of a built decoder, by the name it has there."""

    name: str
    """Name in the decoder's state dict."""
    shape: tuple[int, ...]
    """Its shape; expert stacks are [experts, out, in]."""
    part: Part
    """What it belongs to in the sheet."""
    is_float32: bool = False
    """Held in float32 whatever the dtype of the model."""

    @property
    def is_stack(self) -> bool:
        """Whether the first axis counts experts, which released files store one by one."""
        return ".experts." in self.name

    @property
    def num_tensors(self) -> int:
        """Tensors that a file with one tensor an expert holds for it."""
        return self.shape[0] if self.is_stack else 1


def weights(settings: Model) -> Iterator[Weight]:
    """List every tensor of the decoder in forward order, then the extra prediction layer, then the vision tower."""
    width, vocab = settings.width, settings.vocab_size
    yield Weight("embed.weight", (vocab, width), "embedding")
    for layer in range(settings.num_layers):
        dense = layer < settings.num_dense_layers
        mixes = settings.residuals is not None
        yield from _layer(settings, f"layers.{layer}.", mla=settings.is_mla(layer), dense=dense, mixes=mixes)
    if settings.residuals is not None:
        yield from _mix(settings, "output_mix.")
    yield Weight("output_norm.weight", (width,), "norms")
    yield Weight("head.weight", (vocab, width), "head")
    if settings.multi_token is not None:
        yield Weight("multi_token.hidden_norm.weight", (width,), "multi_token")
        yield Weight("multi_token.embed_norm.weight", (width,), "multi_token")
        yield Weight("multi_token.project.weight", (width, 2 * width), "multi_token")
        mla, dense = settings.is_mla(settings.num_layers - 1), settings.moe is None
        for weight in _layer(settings, "multi_token.layer.", mla=mla, dense=dense, mixes=False):
            yield weight._replace(part="multi_token")
    if settings.vision is not None:
        for name, shape in vision_weights(settings.vision, width):
            yield Weight(name, shape, "vision")


def _mix(settings: Model, name: str) -> Iterator[Weight]:
    yield Weight(f"{name}norm", (settings.width,), "mixing")
    yield Weight(f"{name}query", (settings.width,), "mixing")


def _layer(settings: Model, name: str, *, mla: bool, dense: bool, mixes: bool) -> Iterator[Weight]:
    width = settings.width
    if mixes:
        yield from _mix(settings, f"{name}attention_mix.")
    yield Weight(f"{name}attention_norm.weight", (width,), "norms")
    if mla and settings.mla is not None:
        yield from _mla(width, settings.mla, f"{name}attention.")
    elif settings.kda is not None:
        yield from _kda(width, settings.kda, f"{name}attention.")
    if mixes:
        yield from _mix(settings, f"{name}mlp_mix.")
    yield Weight(f"{name}mlp_norm.weight", (width,), "norms")
    if dense or settings.moe is None:
        yield from _mlp(width, settings.dense_dim, f"{name}mlp.", "dense")
    else:
        yield from _moe(width, settings.moe, f"{name}mlp.")


def _kda(width: int, kda: Kda, name: str) -> Iterator[Weight]:
    inner, rank = kda.num_heads * kda.head_dim, kda.head_dim
    for stream in ("query", "key", "value"):
        yield Weight(f"{name}{stream}.weight", (inner, width), "attention")
    for stream in ("query", "key", "value"):
        yield Weight(f"{name}{stream}_conv", (inner, kda.conv_kernel), "attention", is_float32=True)
    yield Weight(f"{name}decay_down.weight", (rank, width), "attention")
    yield Weight(f"{name}decay_up.weight", (inner, rank), "attention")
    yield Weight(f"{name}decay_rate", (kda.num_heads,), "attention", is_float32=True)
    yield Weight(f"{name}decay_bias", (inner,), "attention", is_float32=True)
    yield Weight(f"{name}beta.weight", (kda.num_heads, width), "attention")
    if kda.output_gate == "full":
        yield Weight(f"{name}gate.weight", (inner, width), "attention")
    else:
        yield Weight(f"{name}gate_down.weight", (rank, width), "attention")
        yield Weight(f"{name}gate_up.weight", (inner, rank), "attention")
    yield Weight(f"{name}norm.weight", (kda.head_dim,), "norms", is_float32=True)
    yield Weight(f"{name}output.weight", (width, inner), "attention")


def _mla(width: int, mla: Mla, name: str) -> Iterator[Weight]:
    queries = mla.num_heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_latent_dim:
        yield Weight(f"{name}query_down.weight", (mla.q_latent_dim, width), "attention")
        yield Weight(f"{name}query_norm.weight", (mla.q_latent_dim,), "norms")
        yield Weight(f"{name}query_up.weight", (queries, mla.q_latent_dim), "attention")
    else:
        yield Weight(f"{name}query.weight", (queries, width), "attention")
    yield Weight(f"{name}latent_down.weight", (mla.kv_latent_dim + mla.rope_dim, width), "attention")
    yield Weight(f"{name}latent_norm.weight", (mla.kv_latent_dim,), "norms")
    rebuilt = mla.num_heads * (mla.nope_dim + mla.value_dim)
    yield Weight(f"{name}latent_up.weight", (rebuilt, mla.kv_latent_dim), "attention")
    if mla.output_gate:
        yield Weight(f"{name}gate.weight", (mla.num_heads * mla.value_dim, width), "attention")
    yield Weight(f"{name}output.weight", (width, mla.num_heads * mla.value_dim), "attention")


def _mlp(width: int, inner: int, name: str, part: Part) -> Iterator[Weight]:
    yield Weight(f"{name}gate.weight", (inner, width), part)
    yield Weight(f"{name}up.weight", (inner, width), part)
    yield Weight(f"{name}down.weight", (width, inner), part)


def _moe(width: int, moe: Moe, name: str) -> Iterator[Weight]:
    yield Weight(f"{name}router.weight", (moe.num_experts, width), "router")
    yield Weight(f"{name}router.balance_bias", (moe.num_experts,), "router", is_float32=True)
    latent = moe.latent_dim or width
    if moe.latent_dim:
        yield Weight(f"{name}latent_down.weight", (latent, width), "latent")
        if moe.latent_norm:
            yield Weight(f"{name}latent_norm.weight", (latent,), "norms")
        yield Weight(f"{name}latent_up.weight", (width, latent), "latent")
    yield Weight(f"{name}experts.gate", (moe.num_experts, moe.expert_dim, latent), "experts")
    yield Weight(f"{name}experts.up", (moe.num_experts, moe.expert_dim, latent), "experts")
    yield Weight(f"{name}experts.down", (moe.num_experts, latent, moe.expert_dim), "experts")
    if moe.num_shared_experts:
        yield from _mlp(width, moe.num_shared_experts * moe.expert_dim, f"{name}shared.", "shared")


@dataclass(frozen=True)
class Sheet:
    """The sizes and costs of one decoder. A multiplication and its addition count as two operations."""

    num_tensors: int
    """Tensors in a file that stores each expert apart."""
    parameters: int
    """All parameters, the extra prediction layer included."""
    active_parameters: int
    """Parameters that produce one token: all but the embedding, the extra layer, the tower and experts not chosen."""
    parameters_by_part: dict[Part, int]
    """The same total, by what the tensors belong to."""
    weight_bytes: int
    """Memory of the weights in bfloat16, with the tensors that stay in float32 at four bytes."""
    context_len: int
    """Tokens of a sequence for the two costs below."""
    forward_flops_per_token: int
    """Two per active parameter, plus attention averaged over a sequence of `context_len` tokens."""
    training_flops_per_token: int
    """Forward and backward: three times the forward cost."""
    cache_bytes_per_token: int
    """What each further token adds to the MLA cache, in bfloat16."""
    cache_bytes_per_sequence: int
    """What a sequence of any length holds: KDA states in float32, convolution windows in bfloat16."""


def sheet(settings: Model, context_len: int | None = None) -> Sheet:
    """Count a decoder.

    Args:
        settings: The decoder.
        context_len: Sequence length for the attention costs; the model's own if not given.

    Source: FLOPs of attention as Kimi Linear (arXiv 2510.26692) equations 13 and 14, with MLA's own head sizes.
    """
    context_len = context_len or settings.context_len
    parts: dict[Part, int] = {}
    num_tensors = active = weight_bytes = 0
    for weight in weights(settings):
        size = prod(weight.shape)
        parts[weight.part] = parts.get(weight.part, 0) + size
        num_tensors += weight.num_tensors
        weight_bytes += size * (4 if weight.is_float32 else 2)
        if weight.part == "experts" and settings.moe is not None:
            active += size // settings.moe.num_experts * settings.moe.top_k
        elif weight.part not in ("embedding", "multi_token", "vision"):
            active += size
    forward = 2 * active + attention_flops_per_token(settings, context_len)
    return Sheet(
        num_tensors=num_tensors,
        parameters=sum(parts.values()),
        active_parameters=active,
        parameters_by_part=parts,
        weight_bytes=weight_bytes,
        context_len=context_len,
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        cache_bytes_per_token=_cache_bytes_per_token(settings),
        cache_bytes_per_sequence=_cache_bytes_per_sequence(settings),
    )


def attention_flops_per_token(settings: Model, context_len: int) -> int:
    """Return the forward cost of scores, states and values (not of projections), averaged over a sequence."""
    flops = 0
    num_mla = len(settings.mla_layers)
    if settings.mla is not None:
        mla = settings.mla
        flops += num_mla * mla.num_heads * context_len * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    if settings.kda is not None:
        dim = settings.kda.head_dim
        cost = 6 * dim * dim + 3 * CHUNK * dim + CHUNK * CHUNK
        flops += (settings.num_layers - num_mla) * settings.kda.num_heads * cost
    return flops


def _cache_bytes_per_token(settings: Model) -> int:
    if settings.mla is None:
        return 0
    return len(settings.mla_layers) * 2 * (settings.mla.kv_latent_dim + settings.mla.rope_dim)


def _cache_bytes_per_sequence(settings: Model) -> int:
    if settings.kda is None:
        return 0
    kda, num_layers = settings.kda, settings.num_layers - len(settings.mla_layers)
    state = 4 * kda.num_heads * kda.head_dim**2
    window = 2 * 3 * (kda.conv_kernel - 1) * kda.num_heads * kda.head_dim
    return num_layers * (state + window)


def tree(settings: Model) -> list[str]:
    """Draw the decoder's tensors as lines of text; layers of one kind share an entry."""
    kinds: dict[str, list[int]] = {}
    for layer in range(settings.num_layers):
        attention = "MLA" if settings.is_mla(layer) else "KDA"
        mlp = "dense MLP" if layer < settings.num_dense_layers else "experts"
        kinds.setdefault(f"{attention} and {mlp}", []).append(layer)
    titles = {f"layers.{layers[0]}": f"layers {_ranges(layers)}: {kind}" for kind, layers in kinds.items()}
    times = {f"layers.{layers[0]}": len(layers) for layers in kinds.values()}
    lines = []
    for owner, group in groupby(weights(settings), key=_owner):
        members = list(group)
        if owner.startswith("layers.") and owner not in titles:
            continue
        count = times.get(owner, 1)
        total = count * sum(prod(weight.shape) for weight in members)
        title = titles.get(owner, owner)
        lines.append(f"{title:<66}{total:>23,}")
        for weight in members:
            name = weight.name.removeprefix(f"{owner}.") if owner != weight.name else weight.name
            repeat = f"{count} x " if count > 1 else ""
            dtype = "  float32" if weight.is_float32 else ""
            lines.append(f"  {name:<30}{repeat}{list(weight.shape)}{dtype}")
    return lines


def _owner(weight: Weight) -> str:
    head, rest = weight.name.split(".", 1)
    return f"{head}.{rest.split('.', 1)[0]}" if head == "layers" else head


def _ranges(layers: list[int], most: int = 4) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(text if len(text) <= most else [*text[: most - 1], "...", text[-1]])


def render(settings: Model, context_len: int | None = None) -> str:
    """Write the tree and the sheet for a person to read."""
    counted = sheet(settings, context_len)
    rows = [
        ("tensors", f"{counted.num_tensors:,}"),
        ("parameters", f"{counted.parameters:,}"),
        ("active for one token", f"{counted.active_parameters:,}"),
        *((f"  {part.replace('_', ' ')}", f"{size:,}") for part, size in counted.parameters_by_part.items()),
        ("weights in bfloat16, bytes", f"{counted.weight_bytes:,}"),
        (f"forward FLOPs a token at {counted.context_len:,}", f"{counted.forward_flops_per_token:,}"),
        (f"training FLOPs a token at {counted.context_len:,}", f"{counted.training_flops_per_token:,}"),
        ("cache bytes a token", f"{counted.cache_bytes_per_token:,}"),
        ("cache bytes a sequence", f"{counted.cache_bytes_per_sequence:,}"),
    ]
    return "\n".join([*tree(settings), "", *(f"{label:<44}{value:>45}" for label, value in rows)])
