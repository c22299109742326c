"""Experts whose weights were rounded before and whose gradients go into buffers."""

import torch

from triax.config.model import Moe, Situ
from triax.kernels.routed import ExpertWeights
from triax.model.latent_moe import Experts
from triax.model.router import Routing

NAMES = ("gate", "up", "down")


def experts():
    moe = Moe(num_experts=4, top_k=2, num_shared_experts=0, expert_dim=16, latent_dim=0)
    return Experts(8, moe, Situ(), init_std=0.3)


def learn(layer, hidden, weight):
    generator = torch.Generator().manual_seed(3)
    expert = torch.rand(len(hidden), 4, generator=generator).argsort(-1)[:, :2]
    output = layer(hidden, Routing(expert, torch.rand(len(hidden), 2, generator=generator)))
    (output * weight).sum().backward()
    return output.detach()


def test_copies_are_multiplied_and_gradients_of_several_passes_add_up_in_the_buffers():
    plain, told = experts(), experts()
    coarse = {name: getattr(plain, name).detach().bfloat16() for name in NAMES}
    plain.load_state_dict({name: copy.float() for name, copy in coarse.items()})
    told.rounded = ExpertWeights(**{name: copy.float() for name, copy in coarse.items()})
    told.sums = ExpertWeights(**{name: torch.zeros_like(getattr(told, name)) for name in NAMES})
    for _ in range(2):
        hidden, weight = torch.randn(11, 8), torch.randn(11, 8)
        torch.testing.assert_close(learn(told, hidden, weight), learn(plain, hidden, weight))
    for name in NAMES:
        assert getattr(told, name).grad is None
        torch.testing.assert_close(getattr(told.sums, name), getattr(plain, name).grad)


def test_copies_and_buffers_are_no_part_of_the_weights():
    layer = experts()
    layer.rounded = layer.sums = ExpertWeights(*(torch.zeros_like(getattr(layer, name)) for name in NAMES))
    assert set(layer.state_dict()) == set(NAMES)
    assert {name for name, _ in layer.named_buffers()} == set()
