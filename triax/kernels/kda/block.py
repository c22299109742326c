"""A block of chunks: its inputs side by side, its walk from state to state, and its gradients.

In a chunk that begins with state S, rows being tokens, K~ = K since the start, K^ = K until the end, Q~ = Q since the
start, A the decayed <k_t, k_i> for i < t and M the decayed <q_t, k_i> for i <= t:

    (I + A diag(beta)) E = V - K~ S      the errors
    O = Q~ S + M U,  U = beta E          what is read and written
    S' = (whole decay) S + K^^T U        the state of the next chunk

With L = beta (I + A diag(beta))^-1, U = L V - (L K~) S: two products a chunk wait for the chunk before, no others.

Source: Kimi Linear (arXiv 2510.26692) section 3; K3 report (arXiv 2607.24653) section 2.1.1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from triax.kernels.kda.table import ChunkTable
from triax.kernels.kda.tiles import Decays, decays, product_gradients, products, unit_lower_inverse


class Block(NamedTuple):
    """The inputs of a block of chunks as [B, C, channels], B = chunks x heads, and what follows from them alone."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor  # [B, C, 1]
    decay: Decays
    query_since: Tensor
    key_since: Tensor
    key_until: Tensor
    reads: Tensor
    overlaps: Tensor
    inverse: Tensor  # of I + overlaps diag(beta)
    writes: Tensor  # beta times the inverse: from what a chunk would see without its own tokens to what it writes
    kept: Tensor  # [B, K, 1]


def take(stream: Tensor, table: ChunkTable, number: int, dtype: torch.dtype) -> Tensor:
    """Lay a block's rows of a [T*H, channels] stream out as [B, C, channels], with zeros for padding."""
    first, end = table.span(number)
    taken = stream.index_select(0, table.rows[first:end].reshape(-1))
    if table.pads[number].numel():
        taken.index_fill_(0, table.pads[number], 0)
    return taken.to(dtype).view(-1, table.chunk, stream.shape[1])


def read_block(
    streams: list[Tensor], table: ChunkTable, number: int, dtype: torch.dtype, lowest_log_decay: float
) -> Block:
    """Gather a block's query, key, value, log decay and beta, and work out what needs no state."""
    query, key, value, log_decay, beta = (take(x, table, number, dtype) for x in streams)
    decay = decays(log_decay, lowest_log_decay)
    reads, overlaps = products(query, key, decay)
    inverse = unit_lower_inverse(overlaps * beta.mT)
    return Block(
        query,
        key,
        value,
        beta,
        decay,
        query * decay.since_start,
        key * decay.since_start,
        key * decay.until_end,
        reads,
        overlaps,
        inverse,
        inverse * beta,
        decay.whole[:, :, None],
    )


def carry(block: Block, table: ChunkTable, number: int, states: Tensor) -> Tensor:
    """Walk a block step by step: fill in the state that follows each chunk, return what each chunk writes."""
    heads, origin = table.num_heads, table.span(number)[0]
    written = torch.bmm(block.writes, block.value)
    seen = torch.bmm(block.writes, block.key_since)
    upward = block.key_until.mT
    for step in table.blocks[number]:
        begin, stop = (step.first - origin) * heads, (step.first - origin + step.count) * heads
        go_on = begin + step.next_count * heads
        now = states[step.first * heads : (step.first + step.count) * heads]
        write = written[begin:stop].baddbmm_(seen[begin:stop], now, alpha=-1)
        following = (step.first + step.count) * heads
        ended = (table.num_chunks + step.next_count) * heads
        for low, high, target in ((begin, go_on, following), (go_on, stop, ended)):
            if low < high:
                inner = slice(low - begin, high - begin)
                result = torch.mul(now[inner], block.kept[low:high], out=states[target : target + high - low])
                result.baddbmm_(upward[low:high], write[inner])
    return written


def carry_back(
    block: Block,
    table: ChunkTable,
    number: int,
    d_out: Tensor,
    d_last: Tensor,
    d_borders: dict[int, Tensor],
    carried: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk a block backwards.

    Returns the gradients of the state after each chunk, of what each chunk writes, and of the states before the block.
    """
    heads, (origin, end) = table.num_heads, table.span(number)
    direct = torch.bmm(block.query_since.mT, d_out)
    d_written = torch.bmm(block.reads.mT, d_out)
    after = torch.empty_like(direct)
    for where, gradient in d_borders.items():
        if origin <= where < end:
            direct.view(-1, heads, *gradient.shape[1:])[where - origin] += gradient
    downward = torch.bmm(block.writes, block.key_since).mT
    flat_last = d_last.view(-1, *d_last.shape[2:])
    steps = table.blocks[number]
    begin = (steps[-1].first - origin) * heads
    after[begin : begin + steps[-1].next_count * heads] = carried
    d_before = carried
    for depth in reversed(range(len(steps))):
        step = steps[depth]
        begin, stop = (step.first - origin) * heads, (step.first - origin + step.count) * heads
        after[begin + step.next_count * heads : stop] = flat_last[step.next_count * heads : step.count * heads]
        now = after[begin:stop]
        d_write = d_written[begin:stop].baddbmm_(block.key_until[begin:stop], now)
        if depth:
            previous = (steps[depth - 1].first - origin) * heads
            d_before = after[previous : previous + step.count * heads]
        else:
            d_before = torch.empty_like(now)
        torch.addcmul(direct[begin:stop], block.kept[begin:stop], now, out=d_before)
        d_before.baddbmm_(downward[begin:stop], d_write, alpha=-1)
    return after, d_written, d_before


def gradients(
    block: Block, before: Tensor, after: Tensor, d_out: Tensor, d_written: Tensor, targets: list[Tensor]
) -> None:
    """Everything else, all chunks at once, given the states before and the gradients of the states after."""
    d_query, d_key, d_value, d_decay, d_beta = targets
    error = torch.bmm(block.inverse, torch.baddbmm(block.value, block.key_since, before, alpha=-1))
    written = error * block.beta
    torch.bmm(block.writes.mT, d_written, out=d_value)  # also the gradient of what a chunk would see without its tokens
    d_reads = torch.bmm(d_out, written.mT)
    d_errors = torch.bmm(d_value, error.mT)
    # What u_t = beta_t e_t gives to beta directly, less what it took from later errors.
    torch.sum(d_written * error, -1, keepdim=True, out=d_beta)
    d_beta.sub_((block.overlaps * d_errors).sum(1)[:, :, None])

    d_overlaps = d_errors.mul_(block.beta.mT.neg())
    in_query, in_row, in_column = product_gradients(block.query, block.key, block.decay, d_reads, d_overlaps)
    in_query.addcmul_(torch.bmm(d_out, before.mT), block.decay.since_start)
    in_row.addcmul_(torch.bmm(d_value, before.mT), block.decay.since_start, value=-1)
    in_state = torch.bmm(written, after.mT).mul_(block.decay.until_end)

    # A token's own <q_t, k_t> has no decay: kept out of what follows, it cannot leave rounding in the decay's gradient.
    own = (d_out * written).sum(-1, keepdim=True)
    torch.addcmul(in_query, own, block.key, out=d_query)
    torch.add(in_row, in_column, out=d_key).add_(in_state).addcmul_(own, block.query)

    # The log decay up to a row multiplies q_t and k_t as rows and divides k_t as a column, and one token's log decay is
    # in the sums of all rows from its own on; what reaches the next state passes the decays of all later rows.
    rows, channels = block.key.shape[1:]
    through = block.key.new_empty(len(block.key), 2, rows, channels)
    torch.mul(block.query, in_query, out=through[:, 0]).addcmul_(block.key, in_row.sub_(in_column))
    torch.mul(block.key, in_state, out=through[:, 1])
    ones = torch.ones(rows, rows, dtype=block.key.dtype, device=block.key.device)
    reach = torch.cat((ones.triu(), ones.tril(-1)), 1).expand(len(block.key), -1, -1)
    torch.bmm(reach, through.view(len(block.key), 2 * rows, channels), out=d_decay)
    d_decay.add_(after.mul_(before).sum(-1).mul_(block.decay.whole)[:, None])
