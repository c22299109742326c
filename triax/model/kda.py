"""The layer that remembers by correcting itself: Kimi Delta Attention."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triax.config import model as config
from triax.kernels import rms_norm
from triax.kernels.kda import kda, stepped
from triax.kernels.kda.decode import step, verify
from triax.kernels.kda.raw import kda_from_raw
from triax.kernels.kda.reference import KdaResult
from triax.kernels.kda.slots import UNIT_EPS, Projected, Slots, Weights
from triax.kernels.linear import linear
from triax.kernels.short_conv import short_conv
from triax.model.cache import KdaCache
from triax.model.layout import Layout
from triax.model.matrix import Blocks, Joins, Linear, join, matrix
from triax.model.memory import Drafts, KdaSlots
from triax.model.norm import Fp32Norm, normalize
from triax.model.precision import KeepsFp32, at_least_fp32


class KDA(Joins, KeepsFp32):
    """Delta-rule attention in which every key channel forgets at its own rate.

    query, key, value = silu(short_conv(W hidden)), query and key of unit norm per head
    z         = W_up W_down hidden + decay_bias
    log_decay = lowest sigmoid(exp(decay_rate) z)   (bounded, K3)   or   -exp(decay_rate) softplus(z)   (Kimi Linear)
    state_t   = decayed + beta key (value - decayed^T key)^T   with   decayed = exp(log_decay) state_{t-1}
    output    = W_o [RMSNorm(state_t^T query / sqrt(K)) sigmoid(W_gate hidden)]

    Source: K3 report (arXiv 2607.24653) section 2.1.1; Kimi Linear (arXiv 2510.26692) section 4.
    """

    query_conv: nn.Parameter
    key_conv: nn.Parameter
    value_conv: nn.Parameter
    fp32 = ("decay_rate", "decay_bias", "query_conv", "key_conv", "value_conv")

    def __init__(self, width: int, settings: config.Kda, norm_eps: float, init_std: float) -> None:
        super().__init__()
        self.settings = settings
        heads, dim, taps = settings.num_heads, settings.head_dim, settings.conv_kernel
        inner = heads * dim
        self.query = matrix(width, inner, init_std)
        self.key = matrix(width, inner, init_std)
        self.value = matrix(width, inner, init_std)
        for name in ("query_conv", "key_conv", "value_conv"):
            kernel = torch.zeros(inner, taps, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(nn.init.uniform_(kernel, -(taps**-0.5), taps**-0.5)))
        self.decay_down = matrix(width, dim, init_std)
        self.decay_up = matrix(dim, inner, init_std)
        self.decay_rate = nn.Parameter(self._fresh_rate())
        self.decay_bias = nn.Parameter(_fresh_bias(inner))
        self.beta = matrix(width, heads, init_std)
        if settings.output_gate == "full":
            self.gate = matrix(width, inner, init_std)
        else:
            self.gate_down = matrix(width, dim, init_std)
            self.gate_up = matrix(dim, inner, init_std)
        self.norm = Fp32Norm(dim, norm_eps)
        self.output = matrix(inner, width, init_std)
        self._ups: Tensor | None = None
        self._conv: Tensor | None = None

    def _fresh_rate(self) -> Tensor:
        heads = self.settings.num_heads
        if self.settings.decay.kind == "bounded":
            return torch.zeros(heads, dtype=torch.float32)
        return (torch.rand(heads, dtype=torch.float32) * 15 + 1).log()

    def forward(
        self, hidden: Float[Tensor, "T D"], layout: Layout, cache: KdaCache | KdaSlots | None = None
    ) -> Float[Tensor, "T D"]:
        """Read and update the memory of each sequence, in order; the cache, if any, is continued in place."""
        inputs = self._project(hidden)
        if isinstance(cache, KdaSlots) and cache.memory.has_kernels:
            return self.output(self._by_kernels(inputs, cache).flatten(-2))
        if isinstance(cache, KdaSlots):
            read = self._over_slots(inputs, cache)
        else:
            if cache is None:
                shape = (len(layout.lengths), self.settings.conv_kernel - 1, inputs.mixed.shape[1])
                window = inputs.mixed.new_zeros(shape)
            else:
                window = cache.window
            mixed, window = short_conv(
                inputs.mixed, self._kernels(), window, layout.starts, wants_window=cache is not None
            )
            state = cache.state if cache is not None else None
            result = self._walk(mixed, inputs, state, layout.starts)
            if cache is not None:
                cache.state, cache.window = result.state.detach(), window.detach().to(cache.window.dtype)
            read = result.read
        gated = rms_norm.gated(read, inputs.gate, self.norm.weight, self.norm.eps, hidden.dtype)
        return self.output(gated.flatten(-2))

    def _walk(
        self,
        mixed: Float[Tensor, "T C"],
        inputs: Projected,
        state: Float[Tensor, "N H K V"] | None,
        starts: Sequence[int],
    ) -> KdaResult:
        if not mixed.is_cuda:
            return kda(*self._activate(mixed, inputs), state, starts, lowest_log_decay=self._lowest())
        heads = self.settings.num_heads
        query, key, value = mixed.unflatten(-1, (3, heads, -1)).unbind(1)
        raw = (query, key, value, inputs.decay, inputs.beta, self.decay_rate, self.decay_bias.view(heads, -1))
        return kda_from_raw(*raw, state, starts, lowest_log_decay=self._lowest())

    def _project(self, hidden: Tensor) -> Projected:
        heads = (self.settings.num_heads, self.settings.head_dim)
        if (whole := self.whole()) is not None:
            mixed, down, gate, beta = linear(hidden, whole).split(self._joined_sizes(), dim=-1)
            if self.settings.output_gate == "full":
                decay = self.decay_up(down)
            elif self._ups is None or torch.is_grad_enabled():
                decay, gate = (
                    up(part) for up, part in zip((self.decay_up, self.gate_up), down.chunk(2, -1), strict=True)
                )
            else:  # both products at once, each over its own half of the columns
                decay, gate = torch.bmm(down.unflatten(-1, (2, -1)).transpose(0, 1), self._ups.mT)
            return Projected(mixed, decay.unflatten(-1, heads), beta, gate.unflatten(-1, heads))
        gate = self.gate(hidden) if self.settings.output_gate == "full" else self.gate_up(self.gate_down(hidden))
        return Projected(
            torch.cat([self.query(hidden), self.key(hidden), self.value(hidden)], dim=-1),
            self.decay_up(self.decay_down(hidden)).unflatten(-1, heads),
            self.beta(hidden),
            gate.unflatten(-1, heads),
        )

    def joinable(self) -> list[Linear]:
        """Return all products of the layer's input."""
        gate = self.gate if self.settings.output_gate == "full" else self.gate_down
        return [self.query, self.key, self.value, self.decay_down, gate, self.beta]

    def join(self) -> None:
        """Lay end to end in memory what may run as one: for answering."""
        super().join()
        if self.settings.output_gate != "full":
            self._ups = join([self.decay_up.weight, self.gate_up.weight]).unflatten(0, (2, -1))
        self._conv = join([self.query_conv, self.key_conv, self.value_conv])

    def _joined_sizes(self) -> list[int]:
        """Columns of query, key and value, of what leads to the decay (and to the gate), of the gate, of beta."""
        inner, dim = self.query.out_features, self.settings.head_dim
        downs = [dim, inner] if self.settings.output_gate == "full" else [2 * dim, 0]
        return [3 * inner, *downs, self.settings.num_heads]

    def _kernels(self) -> Float[Tensor, "C taps"]:
        if self.joined is None or self._conv is None or torch.is_grad_enabled():
            return torch.cat([self.query_conv, self.key_conv, self.value_conv])
        return self._conv

    def _weights(self) -> Weights:
        lowest = self._lowest()
        return Weights(
            self._kernels(),
            self.decay_rate,
            self.decay_bias,
            self.norm.weight,
            self.norm.eps,
            lowest if math.isfinite(lowest) else None,
        )

    def _by_kernels(self, inputs: Projected, cache: KdaSlots) -> Float[Tensor, "T H V"]:
        """Continue sequences in slots by kernels: one launch for those with few new tokens, chunks for the others."""
        memory = cache.memory
        gated: list[Tensor] = []
        if count := memory.num_early:
            weights, slots = self._weights(), Slots(cache.state, cache.window)
            early, slot = Projected(*(part[: memory.early] for part in inputs)), memory.slots[:count]
            if all(part.is_kept for part in memory.parts[:count]):
                gated.append(step(early, weights, slots, slot))
            else:
                rows = Projected(*(part.unflatten(0, (count, -1)) for part in early))
                read, cache.drafts = verify(rows, weights, slots, slot)
                gated.append(read.flatten(0, 1))
        if count < len(memory.parts):
            late = Projected(*(part[memory.early :] for part in inputs))
            starts = [start - memory.early for start in memory.layout.starts[count:]]
            slot = memory.slots[count:]
            mixed, window = short_conv(late.mixed, self._kernels(), cache.window[slot], starts)
            is_fresh = all(part.position == 0 for part in memory.parts[count:])
            result = self._walk(mixed, late, None if is_fresh else cache.state[slot], starts)
            cache.state[slot], cache.window[slot] = result.state, window.to(cache.window.dtype)
            gated.append(rms_norm.gated(result.read, late.gate, self.norm.weight, self.norm.eps, late.gate.dtype))
        return torch.cat(gated) if len(gated) > 1 else gated[0]

    def _lowest(self) -> float:
        decay = self.settings.decay
        return decay.lowest_log_decay if decay.kind == "bounded" else -math.inf

    def _activate(
        self, mixed: Float[Tensor, "T C"], inputs: Projected
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value, log decay and beta; everything from the decay's bias on in fp32."""
        heads, dim = self.settings.num_heads, self.settings.head_dim
        query, key, value = mixed.unflatten(-1, (3, heads, dim)).unbind(1)
        # the mean-square norm with eps / K is the L2 norm with eps, once scaled by K^-1/2; the query takes that twice
        return (
            normalize(query, UNIT_EPS / dim, 1 / dim),
            normalize(key, UNIT_EPS / dim, dim**-0.5),
            value,
            self._log_decay(inputs.decay),
            at_least_fp32(inputs.beta).sigmoid(),
        )

    def _log_decay(self, raw: Float[Tensor, "T H K"]) -> Float[Tensor, "T H K"]:
        z = at_least_fp32(raw) + self.decay_bias.view(raw.shape[1:])
        rate = self.decay_rate.exp()[:, None]
        if self.settings.decay.kind == "bounded":
            return self.settings.decay.lowest_log_decay * (rate * z).sigmoid()
        return -rate * F.softplus(z, threshold=60)  # the default of 20 would cost fp64 its last digits

    def log_decay(self, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "T H K"]:
        """Return the log of what each key channel keeps of each token's input."""
        return self._log_decay(self.decay_up(self.decay_down(hidden)).unflatten(-1, (self.settings.num_heads, -1)))

    def _over_slots(self, inputs: Projected, cache: KdaSlots) -> Float[Tensor, "T H V"]:
        """Continue sequences whose states lie in slots: a token at a time while few are new, else in chunks."""
        memory, starts = cache.memory, cache.memory.layout.starts
        mixed, window = short_conv(inputs.mixed, self._kernels(), cache.window[memory.slots], starts)
        query, key, value, log_decay, beta = self._activate(mixed, inputs)
        kept = log_decay.exp()
        count, stepwise = len(memory.parts), memory.num_stepwise
        read, state = stepped.kda(
            query, key, value, kept, beta, cache.state[memory.slots[:stepwise]], starts[: stepwise + 1]
        )
        if stepwise < count:
            first, end = starts[stepwise], starts[count]
            result = kda(
                query[first:end],
                key[first:end],
                value[first:end],
                log_decay[first:end],
                beta[first:end],
                cache.state[memory.slots[stepwise:count]],
                [start - first for start in starts[stepwise : count + 1]],
                lowest_log_decay=self._lowest(),
            )
            read[first:end] = result.read
            state = torch.cat([state, result.state])
        if all(part.is_kept for part in memory.parts):
            final = slice(count)
        else:
            final = [n for n, part in enumerate(memory.parts) if part.is_kept]
            cache.drafts = Drafts(inputs.mixed, key, value, kept, beta)
        slots = memory.slots[final]
        cache.state[slots] = state[final].to(cache.state.dtype)
        cache.window[slots] = window[final].to(cache.window.dtype)
        return read

    def matrices(self) -> Blocks:
        """Return the logical matrices for the optimiser: one a head where rows belong to heads.

        The rows of `beta` are single heads, so it is none. The down-projections have head_dim rows and are whole.
        """
        dim, width = self.settings.head_dim, self.output.out_features
        gates = ("gate",) if self.settings.output_gate == "full" else ("gate_down", "gate_up")
        heads = ("query", "key", "value", "decay_down", "decay_up", *gates)
        return {f"{name}.weight": (dim,) for name in heads} | {"output.weight": (width,)}


def _fresh_bias(channels: int) -> Tensor:
    """Draw the bias whose softplus is log-uniform in (0.001, 0.1), as in Mamba-2 and Kimi Linear."""
    low, high = math.log(1e-3), math.log(1e-1)
    step = (torch.rand(channels, dtype=torch.float32) * (high - low) + low).exp().clamp(min=1e-4)
    return step + (-torch.expm1(-step)).log()
