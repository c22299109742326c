"""Routed experts as a few grouped matrix products over tokens sorted by expert.

The backward never needs what the down-projection returned: with o = sum_e share_e W_e a_e the gradient of share_e is
<do, W_e a_e> = <W_e^T do, a_e>, and W_e^T do is computed anyway. Kept between the passes: the input as it came (not
gathered per expert), the two pre-activations and the order of the rows.

Source: the identity is SonicMoE's (github.com/Dao-AILab/sonic-moe).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from triax.kernels.moe.activation import Activation

GROUPABLE = (torch.float32, torch.bfloat16, torch.float16)
ALIGNED_BYTES = 16  # what a row of every operand of a grouped product must be a multiple of


class ExpertOrder(NamedTuple):
    """Rows sorted by expert: one row for each pair of a token and an expert it uses."""

    token: Int[Tensor, " R"]
    """Token that a row belongs to."""
    pair: Int[Tensor, " R"]
    """Place of a row in the flattened [T, k] choice."""
    row: Int[Tensor, "T k"]
    """Row of each pair."""
    ends: Int[Tensor, " E"]
    """Where the rows of each expert end."""


def experts(
    hidden: Float[Tensor, "T L"],
    expert: Int[Tensor, "T k"],
    share: Float[Tensor, "T k"],
    gate: Float[Tensor, "E F L"],
    up: Float[Tensor, "E F L"],
    down: Float[Tensor, "E L F"],
    activation: Activation,
) -> Float[Tensor, "T L"]:
    """See `reference.experts`; deterministic, and an expert without tokens gets gradients that are exactly zero.

    Under autocast the products run in autocast's format and the result has it; gradients have the weights' own. A CPU
    that cannot multiply the format multiplies operands rounded to it by its fp32 units, which is many times faster.
    """
    inward = outward = format_of_products(hidden)
    if hidden.device.type == "cpu" and outward not in (torch.float32, torch.float64) and not _cpu_multiplies(outward):
        inward = torch.float32
    return _Experts.apply(hidden, share, gate, up, down, expert, activation, inward, outward)


def format_of_products(hidden: Float[Tensor, "T L"]) -> torch.dtype:
    """Return autocast's format where that is on, else the input's."""
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def sort_by_expert(expert: Int[Tensor, "T k"], num_experts: int) -> ExpertOrder:
    """Sort the pairs of token and expert by expert, in the order of the tokens inside each."""
    chosen, pair = expert.flatten().sort(stable=True)
    row = torch.empty_like(pair).scatter_(0, pair, torch.arange(pair.numel(), device=pair.device))
    each = torch.arange(num_experts, device=pair.device, dtype=chosen.dtype)
    ends = torch.searchsorted(chosen, each, right=True, out_int32=True)
    return ExpertOrder(pair // expert.shape[1], pair, row.view(expert.shape), ends)


class _Operand(NamedTuple):
    """Rounds what is multiplied to one format and hands it on in another, in which it is multiplied."""

    rounded: torch.dtype
    multiplied: torch.dtype

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.rounded).to(self.multiplied)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        share: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        expert: Tensor,
        activation: Activation,
        inward: torch.dtype,
        outward: torch.dtype,
    ) -> Tensor:
        with _no_autocast(hidden):
            order = sort_by_expert(expert, gate.shape[0])
            operand = _Operand(outward, inward)
            rows = operand(hidden).index_select(0, order.token)
            opening = _multiply(rows, operand(gate).transpose(1, 2), order.ends).to(outward)
            passing = _multiply(rows, operand(up).transpose(1, 2), order.ends).to(outward)
            ctx.save_for_backward(hidden, share, gate, up, down, opening, passing, *order)
            ctx.activation, ctx.operand = activation, operand
            inner = activation(_at_least_fp32(opening), _at_least_fp32(passing)) * share.flatten()[order.pair, None]
            returned = _multiply(operand(inner), operand(down).transpose(1, 2), order.ends)
            return _sum_by_token(returned, order).to(outward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        hidden, share, gate, up, down, opening, passing, *order = ctx.saved_tensors
        needs_hidden, needs_share, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:5]
        order, operand = ExpertOrder(*order), ctx.operand
        to_hidden = to_share = to_gate = to_up = to_down = None
        with _no_autocast(hidden):
            above = operand(grad).index_select(0, order.token)
            returned = _multiply(above, operand(down), order.ends)
            weight = share.flatten()[order.pair, None]
            inner, to_opening, to_passing = ctx.activation.gradient(returned * weight, opening, passing)
            if needs_share:
                each = (returned * inner).sum(-1)
                to_share = each.index_select(0, order.row.flatten()).view(share.shape).to(share.dtype)
            if needs_down:
                to_down = _multiply_outer(above, operand(inner * weight), order.ends).to(down.dtype)
            to_opening, to_passing = operand(to_opening), operand(to_passing)
            if needs_gate or needs_up:
                rows = operand(hidden).index_select(0, order.token)
                to_gate = _multiply_outer(to_opening, rows, order.ends).to(gate.dtype)
                to_up = _multiply_outer(to_passing, rows, order.ends).to(up.dtype)
            if needs_hidden:
                to_rows = _multiply(to_opening, operand(gate), order.ends)
                to_rows += _multiply(to_passing, operand(up), order.ends)
                to_hidden = _sum_by_token(to_rows, order).to(hidden.dtype)
        return to_hidden, to_share, to_gate, to_up, to_down, None, None, None, None


def _multiply(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return each row times its expert's matrix: [R, A] and [E, A, B] give [R, B]."""
    if _can_group(rows, weight.shape[1:]):
        return F.grouped_mm(rows, weight, offs=ends)
    parts = rows.split(_lengths(ends))
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


def _multiply_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's sum of outer products over its rows: [R, A] and [R, B] give [E, A, B], zero without rows."""
    lengths = None if left.is_cuda else _lengths(ends)
    if _can_group(left, (left.shape[1], right.shape[1])):
        product = F.grouped_mm(left.T, right, offs=ends)
        if left.is_cuda:  # the CUDA kernel may leave the memory of an expert without rows as it found it
            product.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
        return product
    lengths = _lengths(ends) if lengths is None else lengths
    parts = zip(left.split(lengths), right.split(lengths), strict=True)
    return torch.stack([one.T @ other for one, other in parts])


def _sum_by_token(rows: Tensor, order: ExpertOrder) -> Tensor:
    """Add the rows of each token, in fp32 at least, always in the same order."""
    return F.embedding_bag(order.row, rows, mode="sum")


def _can_group(rows: Tensor, sides: tuple[int, ...]) -> bool:
    return rows.dtype in GROUPABLE and all(side * rows.itemsize % ALIGNED_BYTES == 0 for side in sides)


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _lengths(ends: Tensor) -> list[int]:
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def _cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in this format; without them fp32 is many times faster."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return False
    names = ("amx_bf16", "avx512_bf16", "bf16") if dtype is torch.bfloat16 else ("amx_fp16", "avx512_fp16")
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in names)
