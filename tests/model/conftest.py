"""Decoders whose every weight matters, and the equations written down a second time."""

import importlib.util
from pathlib import Path

import pytest
import torch

from triax.config.model import Model
from triax.model.decoder import Decoder


@pytest.fixture(scope="session")
def equations():
    """The module `float64_transcription.py` beside this file."""
    spec = importlib.util.spec_from_file_location(
        "float64_transcription", Path(__file__).parent / "float64_transcription.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def wake(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Give each tensor values that a trained model could have: nothing is zero, one or equal to its neighbour."""
    noise = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            continue
        values = torch.randn(tensor.shape, generator=noise, dtype=torch.float64)
        if name.endswith("norm.weight") or name.endswith("mix.norm"):
            values = 1 + 0.2 * values
        elif name.endswith("decay_bias"):
            values = 2 * values
        elif name.endswith(("decay_rate", "_conv", "mix.query")):
            values = 0.4 * values
        elif name.endswith("balance_bias"):
            values = 0.1 * values
        else:
            values = values * tensor.shape[-1] ** -0.5
        tensor.copy_(values)
    return model


@pytest.fixture(scope="session")
def awake():
    """Build a decoder with such weights, in float64 unless said."""

    def build(settings: Model, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
        return wake(Decoder(settings).to(torch.float64), seed).to(dtype).eval()

    return build


@pytest.fixture(scope="session")
def waken():
    return wake


@pytest.fixture(scope="session")
def kimi_linear(t0) -> Model:
    """T0 in the manner of Kimi Linear: softplus gate, low-rank output gate, direct queries, plain experts and sums."""
    return Model.model_validate(
        t0.model_dump()
        | {
            "activation": {"kind": "swiglu"},
            "kda": {"num_heads": 2, "head_dim": 16, "decay": {"kind": "softplus"}, "output_gate": "low_rank"},
            "mla": {"num_heads": 2, "kv_latent_dim": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 12},
            "moe": {"num_experts": 8, "top_k": 2, "num_shared_experts": 1, "expert_dim": 16, "share_scale": 2.446},
            "residuals": None,
        }
    )


@pytest.fixture(scope="session")
def k2(t0) -> Model:
    """T0 in the manner of K2: every layer MLA with rotary positions stretched by YaRN, no gate, plain sums."""
    yarn = {"factor": 32, "original_len": 16, "beta_fast": 4.0, "beta_slow": 1.0}
    rope = {"theta": 50000.0, "yarn": yarn}
    mla = {"num_heads": 2, "q_latent_dim": 40, "kv_latent_dim": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 12}
    return Model.model_validate(
        t0.model_dump()
        | {
            "num_layers": 2,
            "mla_layers": (0, 1),
            "activation": {"kind": "swiglu"},
            "kda": None,
            "mla": mla | {"rope": rope},
            "moe": {"num_experts": 8, "top_k": 2, "num_shared_experts": 1, "expert_dim": 16, "share_scale": 2.827},
            "residuals": None,
        }
    )


@pytest.fixture(scope="session")
def family(t0, kimi_linear, k2) -> dict[str, Model]:
    """One small shape of each kind, and K3 with the full form of Attention Residuals."""
    full = Model.model_validate(t0.model_dump() | {"residuals": {"kind": "full"}})
    return {"k3": t0, "kimi_linear": kimi_linear, "k2": k2, "full_residuals": full}
