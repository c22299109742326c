"""Kernels of routed experts for few tokens, interpreted, against the definition."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from triax.errors import UnsupportedError
from triax.kernels.moe import reference

pytest.importorskip("triton")

from triax.kernels.moe.streamed import experts
from triax.kernels.situ_glu import SituGlu


def inputs(tokens, num_experts, top_k, inner, width, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=random)

    chosen = draw(tokens, num_experts).topk(top_k, dim=-1).indices
    share = draw(tokens, top_k).softmax(-1)
    weights = draw(num_experts, inner, width), draw(num_experts, inner, width), draw(num_experts, width, inner)
    return draw(tokens, width), chosen, share, *(w * w.shape[-1] ** -0.5 for w in weights)


@given(
    tokens=st.integers(0, 40),
    num_experts=st.integers(1, 9),
    inner=st.sampled_from([8, 40]),
    width=st.sampled_from([24, 136]),
    caps=st.sampled_from([(None, None), (4.0, 25.0), (4.0, None)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
def test_streamed_experts_equal_the_definition(tokens, num_experts, inner, width, caps, seed):
    values = inputs(tokens, num_experts, min(3, num_experts), inner, width, seed)
    activation = SituGlu(*caps)
    torch.testing.assert_close(
        experts(*values, activation), reference.experts(*values, activation), rtol=1e-4, atol=1e-4
    )


def test_what_stands_beside_is_added():
    values, beside = inputs(5, 4, 2, 8, 24), torch.randn(5, 24)
    plain = experts(*values, SituGlu())
    torch.testing.assert_close(experts(*values, SituGlu(), beside), plain + beside)


def test_one_expert_may_have_more_tokens_than_a_tile():
    hidden, chosen, share, *weights = inputs(37, 3, 1, 8, 24)
    values = hidden, torch.full_like(chosen, 2), share, *weights
    torch.testing.assert_close(experts(*values, SituGlu()), reference.experts(*values, SituGlu()), rtol=1e-4, atol=1e-4)


def test_too_many_tokens_are_refused_by_number():
    values = inputs(1025, 2, 2, 4, 8)
    with pytest.raises(UnsupportedError, match="2050 pairs"):
        experts(*values, SituGlu())


def test_kernels_compile_for_hopper_without_spilling(hopper):
    module = "triax.kernels.moe.streamed"
    shape = {"L": 2304, "F": 1024, "RUN": 64, "ROWS": 16}
    names = ("hidden", "gate", "up", "inner", "down")
    given = {name: "*bf16" for name in names} | {"pair": "*i32", "sorted_expert": "*i32", "P": "i32u"}
    given |= {"gate_cap": "fp32", "up_cap": "fp32", "share": "*fp32", "returned": "*fp32"}
    caps = {"K": 8, "BF": 32, "BL": 128, "HAS_GATE_CAP": True, "HAS_UP_CAP": True}
    wanted = [
        {"module": module, "kernel": "_open", "types": given, "constants": shape | caps},
        {"module": module, "kernel": "_close", "types": given, "constants": shape | {"BD": 64, "BF": 128}},
    ]
    for kernel in hopper([one | {"options": {"num_warps": 4, "num_stages": 4}} for one in wanted]):
        assert kernel.stack == 0
        assert kernel.registers <= 255
        assert kernel.shared <= 227 * 1024
        assert "HMMA" in kernel.sass or "HGMMA" in kernel.sass, "products run on tensor cores"
