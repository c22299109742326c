"""The layer that looks back at every token through one small latent: multi-head latent attention."""

import torch
from jaxtyping import Float
from torch import Tensor

from triax.config import model as config
from triax.kernels.linear import linear, linear_by_head
from triax.kernels.mla import attend, decode, pagewise
from triax.model.cache import MlaCache
from triax.model.layout import Layout
from triax.model.matrix import Blocks, Joins, Linear, matrix
from triax.model.memory import Memory, MlaPages
from triax.model.norm import RMSNorm
from triax.model.precision import at_least_fp32
from triax.model.rotary import magnitude, rotate, turns

FEW, FAR = 64, 4096  # new tokens and earlier ones: keys of so many are not rebuilt for so few


class GatedMLA(Joins):
    """Attention whose keys and values are rebuilt from one cached latent a token.

    [content_query, shared_query] = W_q hidden            per head (optionally through a latent of its own)
    [latent, shared_key] = W_down hidden, latent = RMSNorm(latent); shared_key serves all heads
    [content_key, value] = W_up latent                    per head
    logit  = scale (content_query · content_key + shared_query · shared_key)
    output = W_o [softmax(logit) value, times sigmoid(W_gate hidden) if gated]

    Nothing is rotated unless the settings have `rope`: K3 and Kimi Linear take their order from KDA.

    Source: K3 report (arXiv 2607.24653) section 2.1.2; DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """

    def __init__(self, width: int, settings: config.Mla, init_std: float) -> None:
        super().__init__()
        self.settings = settings
        heads, eps = settings.num_heads, settings.latent_norm_eps
        query_dim = settings.nope_dim + settings.rope_dim
        yarn = settings.rope.yarn if settings.rope else None
        stretch = magnitude(yarn, yarn.mscale_all_dim) if yarn else 1.0
        self.scale = query_dim**-0.5 * stretch**2
        if settings.q_latent_dim:
            self.query_down = matrix(width, settings.q_latent_dim, init_std)
            self.query_norm = RMSNorm(settings.q_latent_dim, eps)
            self.query_up = matrix(settings.q_latent_dim, heads * query_dim, init_std)
        else:
            self.query = matrix(width, heads * query_dim, init_std)
        self.latent_down = matrix(width, settings.kv_latent_dim + settings.rope_dim, init_std)
        self.latent_norm = RMSNorm(settings.kv_latent_dim, eps)
        self.latent_up = matrix(settings.kv_latent_dim, heads * (settings.nope_dim + settings.value_dim), init_std)
        if settings.output_gate:
            self.gate = matrix(width, heads * settings.value_dim, init_std)
        self.output = matrix(heads * settings.value_dim, width, init_std)
        self.largest_logit: Tensor | None = None
        """Largest scaled logit of each head over the training forwards since `reset_largest_logit`."""

    def forward(
        self, hidden: Float[Tensor, "T D"], layout: Layout, cache: MlaCache | MlaPages | None = None
    ) -> Float[Tensor, "T D"]:
        """Attend within each sequence; the cache, if any, is continued in place."""
        query, latent = self._query_and_latent(hidden, layout, cache)
        if isinstance(cache, MlaPages):
            cache.append(latent)
            read = self._over_pages(query, cache)
        else:
            past = cache is not None and any(cache.lengths)
            if cache is not None:
                cache.append(latent, layout)
            if cache is None or not past:
                read = self._expanded(query, latent, layout.starts, layout.starts)
            elif self._absorbing_is_cheaper(layout):
                read = self._absorbed(query, cache, layout)
            else:
                seen = cache.flat().to(latent.dtype)
                read = self._expanded(query, seen, layout.starts, Layout.of(cache.lengths).starts)
        read = read.flatten(-2)
        if self.settings.output_gate:
            # training keeps the attention output in fp32 up to the gate, against a biased rounding
            read = read * self.gate(hidden).to(read.dtype).sigmoid()
        return self.output(read.to(hidden.dtype))

    def _query_and_latent(
        self, hidden: Tensor, layout: Layout, cache: MlaCache | MlaPages | None
    ) -> tuple[Float[Tensor, "T H K"], Float[Tensor, "T L"]]:
        """Project; rotate where positions are rotary. The latent comes normalised, with the shared key behind it."""
        settings = self.settings
        if (whole := self.whole()) is not None:
            query, down = linear(hidden, whole).tensor_split([self._query_in().out_features], dim=-1)
        else:
            query, down = self._query_in()(hidden), self.latent_down(hidden)
        if settings.q_latent_dim:
            query = self.query_up(self.query_norm(query))
        query = query.unflatten(-1, (settings.num_heads, -1))
        latent, shared = down.split([settings.kv_latent_dim, settings.rope_dim], dim=-1)
        if settings.rope:
            if isinstance(cache, MlaPages):
                positions = cache.memory.positions
            else:
                positions = layout.positions(cache.lengths if cache is not None else None, hidden.device)
            cos, sin = turns(settings.rope, settings.rope_dim, positions)
            content, turned = query.split([settings.nope_dim, settings.rope_dim], dim=-1)
            query = torch.cat([content, rotate(turned, cos, sin)], dim=-1)
            shared = rotate(shared, cos, sin)
        return query, torch.cat([self.latent_norm(latent), shared.to(latent.dtype)], dim=-1)

    def _query_in(self) -> Linear:
        return self.query_down if self.settings.q_latent_dim else self.query

    def joinable(self) -> list[Linear]:
        """Return the first products of query and latent."""
        return [self._query_in(), self.latent_down]

    def _expanded(
        self, query: Tensor, latent: Float[Tensor, "S L"], query_starts: tuple[int, ...], key_starts: tuple[int, ...]
    ) -> Float[Tensor, "T H V"]:
        """Rebuild every key and value: the cheaper way for many new tokens."""
        settings = self.settings
        latent, shared = latent.split([settings.kv_latent_dim, settings.rope_dim], dim=-1)
        rebuilt = self.latent_up(latent).unflatten(-1, (settings.num_heads, -1))
        content = rebuilt[..., : settings.nope_dim]
        if torch.is_grad_enabled():
            key = torch.cat([content, shared[:, None].expand(-1, settings.num_heads, -1).to(content.dtype)], dim=-1)
        else:
            key = content.new_empty(*content.shape[:2], settings.nope_dim + settings.rope_dim)
            key[..., : settings.nope_dim], key[..., settings.nope_dim :] = content, shared[:, None]
        counts = self.training and torch.is_grad_enabled()
        # a GPU's kernel wants values as wide as keys: channels that stand before them come along and are left out
        spare = key.shape[-1] - settings.value_dim
        if not (rebuilt.is_cuda and not torch.is_grad_enabled() and 0 <= spare <= settings.nope_dim):
            spare = 0
        value = rebuilt[..., settings.nope_dim - spare :]
        read, largest = attend(
            query.to(key.dtype), key, value, query_starts, key_starts, self.scale, with_largest=counts
        )
        read = read[..., spare:]
        if counts:
            before = self.largest_logit
            self.largest_logit = largest if before is None else torch.maximum(before, largest)
        return read

    def _absorbing_is_cheaper(self, layout: Layout) -> bool:
        """Compare the multiplications of both ways, per cached token and head."""
        settings = self.settings
        content, value, latent = settings.nope_dim, settings.value_dim, settings.kv_latent_dim
        longest = max(layout.lengths, default=0)
        padded_well = longest * len(layout.lengths) <= 4 * layout.num_tokens
        return padded_well and longest * (2 * latent - content - value) <= latent * (content + value)

    def _absorbed(self, query: Tensor, cache: MlaCache, layout: Layout) -> Float[Tensor, "T H V"]:
        """Move W_up to the query and to the result, so that all heads read the latents themselves: for decoding."""
        settings, longest = self.settings, max(layout.lengths)
        query = self._into_latent(query)
        rows, places = layout.sequence(query.device), layout.positions(device=query.device)
        padded = query.new_zeros(len(cache.lengths), longest, *query.shape[1:])
        padded[rows, places] = query

        seen = at_least_fp32(cache.latent[:, : max(cache.lengths)])
        total = torch.tensor(cache.lengths, device=query.device)
        new = torch.tensor(layout.lengths, device=query.device)
        last = (total - new)[:, None] + torch.arange(longest, device=query.device)  # place of each new token
        future = torch.arange(seen.shape[1], device=query.device) > last[:, :, None]
        with torch.autocast(query.device.type, enabled=False):
            logit = torch.einsum("nihl,nsl->nihs", padded.to(seen.dtype), seen) * self.scale
            share = logit.masked_fill(future[:, :, None], -torch.inf).softmax(-1)
            mean = torch.einsum("nihs,nsl->nihl", share, seen[..., : settings.kv_latent_dim])[rows, places]
            return self._from_latent(mean)

    def _over_pages(self, query: Float[Tensor, "T H K"], cache: MlaPages) -> Float[Tensor, "T H V"]:
        """Attend over latents that lie in pages: absorbed while few tokens are new, else with keys rebuilt."""
        memory, starts = cache.memory, cache.memory.layout.starts
        count = max(len(memory.parts), memory.num_early)
        absorbed = memory.num_stepwise
        early = starts[absorbed]
        reads = []
        if early and memory.has_kernels:
            queries = self._into_latent(query[:early]).unflatten(0, memory.seen.shape)
            tables = memory.tables[: memory.num_early]
            mean = decode(queries, cache.latent, tables, memory.seen, self.scale, self.settings.kv_latent_dim)
            reads.append(self._from_latent(mean.flatten(0, 1).to(query.dtype)))
        elif early:
            mean = pagewise.attend(
                self._into_latent(query[:early]),
                cache.latent,
                memory.tables,
                [part.position + part.length for part in memory.parts[:absorbed]],
                starts[: absorbed + 1],
                self.settings.kv_latent_dim,
                self.scale,
            )
            reads.append(self._from_latent(mean))
        while absorbed < count:
            if self._is_far(memory, absorbed):
                reads.append(self._of_far(query, cache, absorbed))
                absorbed += 1
                continue
            end = next((n for n in range(absorbed, count) if self._is_far(memory, n)), count)
            totals = Layout.of([part.position + part.length for part in memory.parts[absorbed:end]])
            own = tuple(start - starts[absorbed] for start in starts[absorbed : end + 1])
            seen = cache.seen(absorbed, totals).to(query.dtype)
            reads.append(self._expanded(query[starts[absorbed] : starts[end]], seen, own, totals.starts))
            absorbed = end
        if len(reads) == 1 and not memory.num_pads:
            return reads[0]
        wide = torch.promote_types(query.dtype, torch.float32)
        pads = query.new_zeros(memory.num_pads, self.settings.num_heads, self.settings.value_dim, dtype=wide)
        return torch.cat([*(read.to(wide) for read in reads), pads])

    def _is_far(self, memory: Memory, row: int) -> bool:
        """Whether a prompt's piece is so short beside what was there before that no keys should be rebuilt for it."""
        part = memory.parts[row]
        return memory.has_kernels and part.length <= FEW and part.position >= FAR

    def _of_far(self, query: Float[Tensor, "T H K"], cache: MlaPages, row: int) -> Float[Tensor, "t H V"]:
        memory, (first, end) = cache.memory, cache.memory.layout.starts[row : row + 2]
        queries, seen = self._into_latent(query[first:end])[None], (memory.positions[first:end] + 1).int()[None]
        table = memory.tables[row : row + 1]
        mean = decode(queries, cache.latent, table, seen, self.scale, self.settings.kv_latent_dim)[0]
        return self._from_latent(mean.to(query.dtype))

    def _into_latent(self, query: Float[Tensor, "T H K"]) -> Float[Tensor, "T H L"]:
        """Move the keys' half of W_up to the query."""
        up_key, _ = self._up()
        content, shared = query.split([self.settings.nope_dim, self.settings.rope_dim], dim=-1)
        absorbed = linear_by_head(content, up_key.mT.to(content.dtype))
        return torch.cat([absorbed, shared], dim=-1)

    def _from_latent(self, mean: Float[Tensor, "T H L"]) -> Float[Tensor, "T H V"]:
        """Rebuild the heads' values from their mean latents, in the format of these."""
        _, up_value = self._up()
        return linear_by_head(mean, up_value.to(mean.dtype))

    def _up(self) -> tuple[Float[Tensor, "H K L"], Float[Tensor, "H V L"]]:
        up = self.latent_up.weight.unflatten(0, (self.settings.num_heads, -1))
        up_key, up_value = up.split([self.settings.nope_dim, self.settings.value_dim], dim=1)
        return up_key, up_value

    def reset_largest_logit(self) -> None:
        """Start a new maximum; the optimiser calls it after each step."""
        self.largest_logit = None

    @torch.no_grad()
    def shrink_query_key(self, factor: Float[Tensor, " H"], alpha: float) -> None:
        """Scale each head's logits by its factor, `alpha` of it through the query; factor 1 leaves a head bit-equal.

        The key part that heads share stays, so the query's own part for it takes the whole factor.

        Source: Kimi K2 (arXiv 2507.20534) section 2.1, algorithm 1.
        """
        settings = self.settings
        factor = factor[:, None, None]
        query = (self.query_up if settings.q_latent_dim else self.query).weight
        query = query.unflatten(0, (settings.num_heads, -1))
        query[:, : settings.nope_dim] *= factor.pow(alpha).to(query)
        query[:, settings.nope_dim :] *= factor.to(query)
        rebuilt = self.latent_up.weight.unflatten(0, (settings.num_heads, -1))
        rebuilt[:, : settings.nope_dim] *= factor.pow(1 - alpha).to(rebuilt)

    def matrices(self) -> Blocks:
        """Return the logical matrices for the optimiser: one a head where rows are a head's, keys and values apart."""
        settings = self.settings
        per_head = (settings.nope_dim + settings.rope_dim,)
        blocks: Blocks = {
            "latent_down.weight": (settings.kv_latent_dim + settings.rope_dim,),
            "latent_up.weight": (settings.nope_dim, settings.value_dim),
            "output.weight": (self.output.out_features,),
        }
        if settings.q_latent_dim:
            blocks |= {"query_down.weight": (settings.q_latent_dim,), "query_up.weight": per_head}
        else:
            blocks |= {"query.weight": per_head}
        return blocks | ({"gate.weight": (settings.value_dim,)} if settings.output_gate else {})
