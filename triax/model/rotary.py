"""Rotary positions, with YaRN stretching, for the models that use them.

Source: YaRN (arXiv 2309.00071); DeepSeek-V2 (arXiv 2405.04434) section 2.1.3 for the pairing of neighbouring channels.
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from triax.config.model import Rope, Yarn


@lru_cache(maxsize=16)
def frequencies(settings: Rope, dim: int) -> tuple[float, ...]:
    """Return how far each of the `dim / 2` pairs turns per token, in radians."""
    plain = [settings.theta ** (-2 * i / dim) for i in range(dim // 2)]
    yarn = settings.yarn
    if yarn is None:
        return tuple(plain)
    low = max(math.floor(_pair_of(yarn.beta_fast, settings, dim)), 0)
    high = min(math.ceil(_pair_of(yarn.beta_slow, settings, dim)), dim - 1)
    width = high - low if high > low else 0.001  # K2 has both at 1: a step instead of a ramp
    stretched = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
    return tuple(f * (1 - s) + f / yarn.factor * s for f, s in zip(plain, stretched, strict=True))


def _pair_of(rotations: float, settings: Rope, dim: int) -> float:
    """Return the (fractional) pair that makes this many rotations over the original context."""
    assert settings.yarn is not None
    return dim * math.log(settings.yarn.original_len / (rotations * 2 * math.pi)) / (2 * math.log(settings.theta))


def magnitude(yarn: Yarn | None, mscale: float) -> float:
    """Return YaRN's temperature `0.1 mscale ln(factor) + 1`; 1 without YaRN."""
    return 1.0 if yarn is None or yarn.factor <= 1 else 0.1 * mscale * math.log(yarn.factor) + 1


def turns(
    settings: Rope, dim: int, positions: Int[Tensor, " T"]
) -> tuple[Float[Tensor, "T pairs"], Float[Tensor, "T pairs"]]:
    """Return cosine and sine of each position's angles; angles in fp64, since a long context eats fp32's digits."""
    per_token = torch.tensor(frequencies(settings, dim), dtype=torch.float64, device=positions.device)
    angle = positions[:, None] * per_token
    yarn = settings.yarn
    scale = 1.0 if yarn is None else magnitude(yarn, yarn.mscale) / magnitude(yarn, yarn.mscale_all_dim)
    return angle.cos() * scale, angle.sin() * scale


def rotate(
    x: Shaped[Tensor, "T *heads R"], cos: Float[Tensor, "T pairs"], sin: Float[Tensor, "T pairs"]
) -> Shaped[Tensor, "T *heads R"]:
    """Turn each pair of neighbouring channels by its token's angle; computed in fp32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    shape = (len(x), *[1] * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.to(wide).reshape(shape), sin.to(wide).reshape(shape)
    even, odd = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
