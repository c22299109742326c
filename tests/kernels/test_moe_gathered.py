"""Kernels around the grouped products of many tokens, interpreted, against the definition."""

import pytest
import torch

from triax.errors import UnsupportedError
from triax.kernels.moe import reference

pytest.importorskip("triton")

from triax.kernels.moe.gathered import experts
from triax.kernels.situ_glu import SituGlu


def inputs(tokens, num_experts, top_k, inner, width, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=random)

    chosen = draw(tokens, num_experts).topk(top_k, dim=-1).indices
    weights = draw(num_experts, inner, width), draw(num_experts, inner, width), draw(num_experts, width, inner)
    return draw(tokens, width), chosen, draw(tokens, top_k).softmax(-1), *(w * w.shape[-1] ** -0.5 for w in weights)


@pytest.mark.parametrize("caps", [(None, None), (4.0, 25.0)])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(37, 5, 3), (1, 4, 4), (0, 3, 2), (19, 8, 1)])
def test_gathered_experts_equal_the_definition(tokens, num_experts, top_k, caps):
    values, activation = inputs(tokens, num_experts, top_k, 40, 24), SituGlu(*caps)
    torch.testing.assert_close(
        experts(*values, activation), reference.experts(*values, activation), rtol=1e-4, atol=1e-4
    )


def test_what_stands_beside_is_added():
    values, beside = inputs(5, 4, 2, 8, 24), torch.randn(5, 24)
    torch.testing.assert_close(experts(*values, SituGlu(), beside), experts(*values, SituGlu()) + beside)


def test_rows_that_no_grouped_product_takes_are_refused_by_size():
    with pytest.raises(UnsupportedError, match="matrices of 8 by 23"):
        experts(*inputs(3, 2, 1, 8, 23), SituGlu())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [700, 3000])
def test_gathered_experts_equal_the_definition_on_a_gpu(tokens):
    hidden, chosen, share, *weights = inputs(tokens, 16, 4, 256, 192)
    expected = reference.experts(hidden.double(), chosen, share.double(), *(w.double() for w in weights), SituGlu())
    narrow = [x.cuda().bfloat16() for x in (hidden, *weights)]
    found = experts(narrow[0], chosen.cuda(), share.cuda(), *narrow[1:], SituGlu()).cpu().double()
    assert ((found - expected).norm() / expected.norm()).item() < 1e-2
