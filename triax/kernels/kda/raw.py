"""KDA from what the projections and convolutions of a layer give: norms, gate and beta are applied on the way.

On Hopper the kernels apply them in registers, forward and backward, so that nothing activated is ever stored.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from triax.kernels.dispatch import mode
from triax.kernels.kda.direct import Pass, with_gradient
from triax.kernels.kda.reference import KdaResult, state_dtype
from triax.kernels.kda.slots import UNIT_EPS


def activate(
    query: Float[Tensor, "T Q K"],
    key: Float[Tensor, "T Q K"],
    gate: Float[Tensor, "T H K"],
    beta: Float[Tensor, "T H"],
    rates: Float[Tensor, " H"],
    biases: Float[Tensor, "H K"],
    lowest_log_decay: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return unit queries times K^-1/2, unit keys, log decay and beta, as `kda` wants them; the latter two in fp32.

    log_decay = lowest_log_decay * sigmoid(e^rates (gate + biases)), or -e^rates softplus(gate + biases) without a bound

    Source: K3 report (arXiv 2607.24653) section 2.1.1; Kimi Linear (arXiv 2510.26692) section 4.
    """
    dtype = state_dtype(query, key, gate, beta, rates, biases)
    z, rate = gate.to(dtype) + biases.to(dtype), rates.to(dtype).exp()[:, None]
    bounded = math.isfinite(lowest_log_decay)
    # A threshold of 20 would cost fp64 its last digits.
    log_decay = lowest_log_decay * (rate * z).sigmoid() if bounded else -rate * F.softplus(z, threshold=60)
    return _unit(query, query.shape[-1] ** -0.5), _unit(key, 1.0), log_decay, beta.to(dtype).sigmoid()


def _unit(x: Tensor, scale: float) -> Tensor:
    wide = x.to(state_dtype(x))
    return (wide * ((wide.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt() * scale)).to(x.dtype)


def kda_from_raw(
    query: Float[Tensor, "T Q K"],
    key: Float[Tensor, "T Q K"],
    value: Float[Tensor, "T H V"],
    gate: Float[Tensor, "T H K"],
    beta: Float[Tensor, "T H"],
    rates: Float[Tensor, " H"],
    biases: Float[Tensor, "H K"],
    state: Float[Tensor, "N H K V"] | None,
    starts: Sequence[int],
    *,
    lowest_log_decay: float,
    states_at: Sequence[int] = (),
) -> KdaResult:
    """Compute `kda` of what `activate` makes of these inputs; gradients reach every tensor given.

    Args:
        query: Where to read, of any length. H / Q value heads in a row share a query and a key.
        key: Where to write, of any length.
        value: What the memory should hold at `key`.
        gate: What the decay is computed from, before its bias.
        beta: Logit of the share of the error to write.
        rates: Log of the gate's slope, or of the factor on its softplus; one a head.
        biases: Added to `gate`.
        state: Memory of each sequence before its first token; none is empty memory.
        starts: First token of each sequence, in order, and the number of tokens at the end.
        lowest_log_decay: The gate's lower bound, negative; minus infinity for a softplus gate.
        states_at: As in `kda`.

    Returns:
        What each token read, the memory after each sequence, and the memories asked for.

    Raises:
        UnsupportedError: As `kda`.
        ValueError: As `kda`.
    """
    from triax.kernels import kda as operation

    if query.is_cuda and len(query) and mode() != "reference":
        from triax.kernels.kda.flash import LOWEST_ANCHORED, anchors
        from triax.kernels.kda.hopper import passes

        fits = query.shape == key.shape and value.shape == gate.shape and value.shape[:2] == beta.shape
        fits = fits and value.shape[1] % key.shape[1] == 0 and gate.dtype == torch.bfloat16
        form = lowest_log_decay >= LOWEST_ANCHORED or lowest_log_decay == -math.inf
        if fits and form and passes.takes(query, key, value):
            operation.check_numbers(tuple(starts), tuple(states_at), lowest_log_decay, None)
            inputs = (query, key, value, gate, beta, rates, biases, state)
            keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
            numbers = (list(starts), list(states_at), lowest_log_decay, *anchors(lowest_log_decay, query.dtype))
            read, final, interior, *_ = _run(*inputs, *numbers, keep)
            return KdaResult(read, final, interior)
    query, key, log_decay, beta = activate(query, key, gate, beta, rates, biases, lowest_log_decay)
    return operation.kda(
        query, key, value, log_decay, beta, state, starts, lowest_log_decay=lowest_log_decay, states_at=states_at
    )


def _raw(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    rates: Tensor,
    biases: Tensor,
    state: Tensor | None,
    starts: Sequence[int],
    states_at: Sequence[int],
    lowest: float,
    rows: int,
    is_causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what was read, the last states, those wanted, and for the backward pass all chunks' states and writes."""
    from triax.kernels.kda.flash import Anchors, run_table
    from triax.kernels.kda.hopper import passes
    from triax.kernels.kda.hopper.launch import Raw

    table = run_table(tuple(starts), tuple(states_at), query.device)
    raw = Raw(rates.float().contiguous(), biases.float().contiguous(), lowest)
    return passes.forward(query, key, value, gate, beta, state, table, keep, Anchors(rows, is_causal), raw)


def _raw_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    rates: Tensor,
    biases: Tensor,
    states: Tensor,
    written: Tensor,
    d_read: Tensor,
    d_final: Tensor,
    d_interior: Tensor,
    starts: Sequence[int],
    states_at: Sequence[int],
    lowest: float,
    rows: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the seven raw inputs and of the first states."""
    from triax.kernels.kda.flash import Anchors, ends_of, run_table
    from triax.kernels.kda.hopper import passes
    from triax.kernels.kda.hopper.launch import Raw

    table = run_table(tuple(starts), tuple(states_at), query.device)
    raw = Raw(rates.float().contiguous(), biases.float().contiguous(), lowest)
    inputs = (query, key, value, gate, beta, states, written)
    d_ends = ends_of(table, d_final, d_interior)
    of, d_state = passes.backward(*inputs, d_read, d_ends, table, Anchors(rows, is_causal), raw)
    assert of.rates is not None
    assert of.biases is not None
    share = beta.float().sigmoid()
    d_beta = (of.beta * share * (1 - share)).to(beta.dtype)
    d_biases, d_rates = of.biases.to(biases.dtype), of.rates.to(rates.dtype)
    return of.query, of.key, of.value, of.log_decay.to(gate.dtype), d_beta, d_rates, d_biases, d_state


kda_raw = torch.library.custom_op("triax::kda_raw", _raw, mutates_args=())
kda_raw_backward = torch.library.custom_op("triax::kda_raw_backward", _raw_backward, mutates_args=())


@kda_raw.register_fake
def _(query, key, value, gate, beta, rates, biases, state, starts, states_at, lowest, rows, is_causal, keep):
    from triax.kernels.kda.flash import kda_flash_shapes

    return kda_flash_shapes(key, value, starts, states_at, keep, torch.bfloat16)


@kda_raw_backward.register_fake
def _(query, key, value, gate, beta, rates, biases, states, written, d_read, d_final, *_rest):
    inputs = (query, key, value, gate, beta, rates, biases)
    return *(x.new_empty(x.shape) for x in inputs), d_final.new_empty(d_final.shape, dtype=torch.float32)


_run = with_gradient(Pass(_raw, kda_raw), Pass(_raw_backward, kda_raw_backward), num_streams=7)
