"""The published equations written down once more, token by token in float64, sharing no code with the package.

Weights come as a plain dict in our names. One sequence at a time; no batches, no chunks, no cache.
"""

import math

import torch
from torch import Tensor

F8 = torch.float64


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return weight * x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + eps)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def glu(g: Tensor, u: Tensor, activation) -> Tensor:
    if activation.kind == "swiglu":
        return silu(g) * u
    left = activation.gate_cap * torch.tanh(g / activation.gate_cap) * sigmoid(g)
    return left * (u if activation.up_cap is None else activation.up_cap * torch.tanh(u / activation.up_cap))


def mlp(w: dict, at: str, x: Tensor, activation) -> Tensor:
    inner = glu(w[f"{at}.gate.weight"] @ x, w[f"{at}.up.weight"] @ x, activation)
    return w[f"{at}.down.weight"] @ inner


def kda(w: dict, at: str, xs: list[Tensor], cfg, eps: float) -> list[Tensor]:
    heads, dim, taps = cfg.num_heads, cfg.head_dim, cfg.conv_kernel
    streams = {name: [w[f"{at}.{name}.weight"] @ x for x in xs] for name in ("query", "key", "value")}
    state = [torch.zeros(dim, dim, dtype=F8) for _ in range(heads)]
    results = []
    for t, x in enumerate(xs):
        mixed = {}
        for name, values in streams.items():
            total = torch.zeros(heads * dim, dtype=F8)
            for j in range(taps):
                source = t - (taps - 1) + j
                if source >= 0:
                    total = total + w[f"{at}.{name}_conv"][:, j] * values[source]
            mixed[name] = silu(total)
        z = w[f"{at}.decay_up.weight"] @ (w[f"{at}.decay_down.weight"] @ x) + w[f"{at}.decay_bias"]
        beta = sigmoid(w[f"{at}.beta.weight"] @ x)
        if f"{at}.gate.weight" in w:
            gate = w[f"{at}.gate.weight"] @ x
        else:
            gate = w[f"{at}.gate_up.weight"] @ (w[f"{at}.gate_down.weight"] @ x)
        outputs = []
        for h in range(heads):
            own = slice(h * dim, (h + 1) * dim)
            q, k, v = mixed["query"][own], mixed["key"][own], mixed["value"][own]
            q, k = q / torch.sqrt((q * q).sum() + 1e-6), k / torch.sqrt((k * k).sum() + 1e-6)
            rate = torch.exp(w[f"{at}.decay_rate"][h])
            if cfg.decay.kind == "bounded":
                g = cfg.decay.lowest_log_decay * sigmoid(rate * z[own])
            else:
                g = -rate * torch.log1p(torch.exp(z[own]))
            decayed = torch.diag(torch.exp(g)) @ state[h]
            state[h] = decayed + beta[h] * torch.outer(k, v - decayed.T @ k)
            o = state[h].T @ q / math.sqrt(dim)
            outputs.append(rms(o, w[f"{at}.norm.weight"], eps) * sigmoid(gate[own]))
        results.append(w[f"{at}.output.weight"] @ torch.cat(outputs))
    return results


def rope_angles(rope, dim: int, position: int) -> tuple[list[float], float]:
    """Angle of each pair and the factor on cosine and sine (DeepSeek's YaRN)."""
    angles, scale, yarn = [], 1.0, rope.yarn
    for i in range(dim // 2):
        f = rope.theta ** (-2 * i / dim)
        if yarn is not None:

            def pair(rotations: float) -> float:
                return dim * math.log(yarn.original_len / (2 * math.pi * rotations)) / (2 * math.log(rope.theta))

            low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), dim - 1)
            ramp = (i - low) / ((high - low) or 0.001)
            keep = 1 - min(1.0, max(0.0, ramp))
            f = f * keep + (f / yarn.factor) * (1 - keep)
        angles.append(position * f)
    if yarn is not None and yarn.factor > 1:
        log = math.log(yarn.factor)
        scale = (0.1 * yarn.mscale * log + 1) / (0.1 * yarn.mscale_all_dim * log + 1)
    return angles, scale


def rotated(x: Tensor, rope, position: int) -> Tensor:
    angles, scale = rope_angles(rope, len(x), position)
    pieces = []
    for i, angle in enumerate(angles):
        c, s = math.cos(angle) * scale, math.sin(angle) * scale
        pieces += [x[2 * i] * c - x[2 * i + 1] * s, x[2 * i] * s + x[2 * i + 1] * c]
    return torch.stack(pieces)


def mla(w: dict, at: str, xs: list[Tensor], cfg, *, first_position: int = 0) -> list[Tensor]:
    n, r, v, eps = cfg.nope_dim, cfg.rope_dim, cfg.value_dim, cfg.latent_norm_eps
    scale = (n + r) ** -0.5
    if cfg.rope is not None and cfg.rope.yarn is not None and cfg.rope.yarn.factor > 1:
        scale *= (0.1 * cfg.rope.yarn.mscale_all_dim * math.log(cfg.rope.yarn.factor) + 1) ** 2
    keys, values, results = [], [], []
    for t, x in enumerate(xs):
        down = w[f"{at}.latent_down.weight"] @ x
        shared = down[cfg.kv_latent_dim :]
        latent = rms(down[: cfg.kv_latent_dim], w[f"{at}.latent_norm.weight"], eps)
        if f"{at}.query.weight" in w:
            query = w[f"{at}.query.weight"] @ x
        else:
            compressed = rms(w[f"{at}.query_down.weight"] @ x, w[f"{at}.query_norm.weight"], eps)
            query = w[f"{at}.query_up.weight"] @ compressed
        if cfg.rope is not None:
            shared = rotated(shared, cfg.rope, first_position + t)
        rebuilt = w[f"{at}.latent_up.weight"] @ latent
        keys.append([])
        values.append([])
        outputs = []
        for h in range(cfg.num_heads):
            part = rebuilt[h * (n + v) : (h + 1) * (n + v)]
            keys[t].append(torch.cat([part[:n], shared]))
            values[t].append(part[n:])
            q = query[h * (n + r) : (h + 1) * (n + r)]
            if cfg.rope is not None:
                q = torch.cat([q[:n], rotated(q[n:], cfg.rope, first_position + t)])
            logit = torch.stack([(q * keys[s][h]).sum() * scale for s in range(t + 1)])
            share = torch.exp(logit - logit.max())
            share = share / share.sum()
            outputs.append(sum(share[s] * values[s][h] for s in range(t + 1)))
        out = torch.cat(outputs)
        if cfg.output_gate:
            out = out * sigmoid(w[f"{at}.gate.weight"] @ x)
        results.append(w[f"{at}.output.weight"] @ out)
    return results


def moe(w: dict, at: str, x: Tensor, cfg, activation, eps: float) -> Tensor:
    score = sigmoid(w[f"{at}.router.weight"] @ x)
    biased = score + w[f"{at}.router.balance_bias"]
    chosen = sorted(range(cfg.num_experts), key=lambda e: -biased[e].item())[: cfg.top_k]
    total = sum(score[e] for e in chosen) + 1e-20 if cfg.renormalize else 1.0
    z = w[f"{at}.latent_down.weight"] @ x if cfg.latent_dim else x
    u = torch.zeros_like(z)
    for e in chosen:
        inner = glu(w[f"{at}.experts.gate"][e] @ z, w[f"{at}.experts.up"][e] @ z, activation)
        u = u + score[e] / total * cfg.share_scale * (w[f"{at}.experts.down"][e] @ inner)
    if cfg.latent_dim:
        if cfg.latent_norm:
            u = rms(u, w[f"{at}.latent_norm.weight"], eps)
        u = w[f"{at}.latent_up.weight"] @ u
    return u + mlp(w, f"{at}.shared", x, activation) if cfg.num_shared_experts else u


def mix(w: dict, at: str, sources: list[Tensor], eps: float) -> Tensor:
    scores = torch.stack([(w[f"{at}.query"] * rms(v, w[f"{at}.norm"], eps)).sum() for v in sources])
    share = torch.exp(scores - scores.max())
    share = share / share.sum()
    return sum(a * v for a, v in zip(share, sources, strict=True))


def layer(w: dict, at: str, xs: list[Tensor], model, i: int) -> list[Tensor]:
    """The attention part of layer i: inputs already mixed."""
    xs = [rms(x, w[f"{at}.attention_norm.weight"], model.norm_eps) for x in xs]
    if i in model.mla_layers:
        return mla(w, f"{at}.attention", xs, model.mla)
    return kda(w, f"{at}.attention", xs, model.kda, model.norm_eps)


def feed(w: dict, at: str, x: Tensor, model, *, is_dense: bool) -> Tensor:
    x = rms(x, w[f"{at}.mlp_norm.weight"], model.norm_eps)
    if is_dense:
        return mlp(w, f"{at}.mlp", x, model.activation)
    return moe(w, f"{at}.mlp", x, model.moe, model.activation, model.norm_eps)


def last_mix(w: dict, embedded: list[Tensor], model) -> list[Tensor]:
    """What the last norm reads, for each token of one sequence."""
    eps, kind = model.norm_eps, model.residuals.kind if model.residuals else "none"
    tokens = range(len(embedded))
    p: list = list(embedded)
    frozen: list[list[Tensor]] = [[] for _ in tokens]

    def read(name: str) -> list[Tensor]:
        if kind == "none":
            return p
        return [p[t] if not frozen[t] else mix(w, name, [*frozen[t], p[t]], eps) for t in tokens]

    def write(outputs: list[Tensor], *, fresh: bool) -> None:
        for t in tokens:
            if fresh:
                frozen[t].append(p[t])
                p[t] = outputs[t]
            else:
                p[t] = p[t] + outputs[t]

    for i in range(model.num_layers):
        at = f"layers.{i}"
        h = read(f"{at}.attention_mix")
        starts_block = kind == "block" and i % model.residuals.block_layers == 0
        write(layer(w, at, h, model, i), fresh=kind == "full" or starts_block)
        h = read(f"{at}.mlp_mix")
        dense = i < model.num_dense_layers
        write([feed(w, at, x, model, is_dense=dense) for x in h], fresh=kind == "full")
    return read("output_mix")


def logits(w: dict, embedded: Tensor, model) -> Tensor:
    """Logits of one sequence, from its embedded tokens."""
    hidden = [rms(x, w["output_norm.weight"], model.norm_eps) for x in last_mix(w, list(embedded), model)]
    return torch.stack([w["head.weight"] @ x for x in hidden])


def second_logits(w: dict, embedded: Tensor, next_embedded: Tensor, model) -> Tensor:
    """Logits of the multi-token layer: one plain pre-norm layer on W [RMSNorm(h); RMSNorm(next)]."""
    at, eps = "multi_token", model.norm_eps
    xs = []
    for h, e in zip(last_mix(w, list(embedded), model), next_embedded, strict=True):
        both = torch.cat([rms(h, w[f"{at}.hidden_norm.weight"], eps), rms(e, w[f"{at}.embed_norm.weight"], eps)])
        xs.append(w[f"{at}.project.weight"] @ both)
    attended = layer(w, f"{at}.layer", xs, model, model.num_layers - 1)
    xs = [x + a for x, a in zip(xs, attended, strict=True)]
    xs = [x + feed(w, f"{at}.layer", x, model, is_dense=model.moe is None) for x in xs]
    return torch.stack([w["head.weight"] @ rms(x, w["output_norm.weight"], eps) for x in xs])
