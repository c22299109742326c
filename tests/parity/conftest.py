"""transformers as an oracle: its classes read what we export, without network and flash-linear-attention."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import importlib.util

import pytest
import torch

from triax.checkpoint.released import save_released
from triax.config.model import Model
from triax.model.decoder import Decoder

COMMON = {
    "vocab_size": 96,
    "width": 48,
    "num_layers": 4,
    "num_dense_layers": 1,
    "dense_dim": 80,
    "activation": {"kind": "swiglu"},
    "moe": {"num_experts": 8, "top_k": 3, "num_shared_experts": 2, "expert_dim": 24, "share_scale": 2.446},
}
MLA = {"num_heads": 3, "kv_latent_dim": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 12}
YARN = {"factor": 32.0, "original_len": 64, "beta_fast": 8.0, "beta_slow": 1.0}
SHAPES = {
    "kimi_linear": COMMON
    | {
        "mla_layers": (2,),
        "mla": MLA,
        "kda": {"num_heads": 2, "head_dim": 16, "decay": {"kind": "softplus"}, "output_gate": "low_rank"},
    },
    "k2": COMMON
    | {
        "mla_layers": (0, 1, 2, 3),
        "norm_eps": 1e-6,
        "mla": MLA | {"q_latent_dim": 20, "rope": {"theta": 50000.0, "yarn": YARN}},
    },
    "moonlight": COMMON | {"mla_layers": (0, 1, 2, 3), "mla": MLA | {"rope": {"theta": 50000.0}}},
}
FAMILY = {"kimi_linear": "kimi_linear", "k2": "deepseek_v3", "moonlight": "deepseek_v3"}


def random_model(shape, seed=0):
    """A decoder with weights large enough that every part of it moves the logits."""
    torch.manual_seed(seed)
    model = Decoder(Model.model_validate(SHAPES[shape])).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.normal_(1.0, 0.2)
            elif name.endswith(("_conv", "decay_rate", "decay_bias")):
                tensor.normal_(0.0, 0.5)
            elif name.endswith("balance_bias"):
                tensor.normal_(0.0, 0.1)
            else:
                tensor.normal_(0.0, 0.02 if name == "embed.weight" else tensor.shape[-1] ** -0.5)
            # inputs of norms so small that another epsilon would show
            if name.endswith("latent_down.weight"):
                tensor[: MLA["kv_latent_dim"]] *= 0.01
            elif name.endswith(("query_down.weight", "value_conv")):
                tensor *= 0.01
    return model


def read_by_transformers(folder):
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    theirs, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return theirs.eval()


@pytest.fixture(scope="session", autouse=True)
def plain_torch_oracle():
    assert importlib.util.find_spec("fla") is None, (
        "flash-linear-attention breaks the CPU path of the oracle: uninstall it"
    )


@pytest.fixture(scope="session", params=sorted(SHAPES))
def pair(request, tmp_path_factory):
    """Our model and the one transformers makes of its export."""
    ours = random_model(request.param)
    folder = tmp_path_factory.mktemp("parity") / request.param
    save_released(ours, folder, dtype=torch.float32, family=FAMILY[request.param])
    return ours, read_by_transformers(folder)
