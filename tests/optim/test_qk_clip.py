import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from triax.optim.qk_clip import attention_layers, clip_query_key, factor


class Attention(nn.Module):
    """Heads whose logits are plain products of query and key rows."""

    def __init__(self, num_heads, size=1.0):
        super().__init__()
        self.query = nn.Parameter(torch.randn(num_heads, 4, 6) * size)
        self.key = nn.Parameter(torch.randn(num_heads, 4, 6))
        self.largest_logit = None

    def shrink_query_key(self, factor, alpha):
        self.query.data *= factor[:, None, None] ** alpha
        self.key.data *= factor[:, None, None] ** (1 - alpha)

    def reset_largest_logit(self):
        self.largest_logit = None

    def measure(self, hidden):
        logits = torch.einsum("hkd,td,hkc,sc->hts", self.query, hidden, self.key, hidden)
        self.largest_logit = logits.detach().amax((1, 2))
        return self.largest_logit


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
    threshold=st.floats(1.0, 200.0, width=32),
)
def test_heads_at_or_under_the_threshold_keep_scale_exactly_one(logits, threshold):
    found = factor(torch.tensor(logits), threshold)
    for logit, scale in zip(logits, found.tolist(), strict=True):
        if logit <= threshold:
            assert scale == 1.0
        else:
            assert scale * logit == pytest.approx(threshold, rel=1e-5)


def test_a_failed_forward_does_not_erase_weights():
    assert factor(torch.tensor([float("inf"), float("nan"), -float("inf")]), 100.0).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_after_the_clip_the_largest_logit_is_the_threshold(alpha):
    hidden = torch.randn(10, 6)
    layer = Attention(3)
    layer.query.data[0] *= 50
    layer.query.data[2] *= 1e-3
    before = layer.measure(hidden)
    threshold = float(before[1]) + 1.0
    clipped = clip_query_key({"only": layer}, threshold, alpha)
    after = layer.measure(hidden)
    assert clipped.num_clipped == 1
    torch.testing.assert_close(after[0], torch.tensor(threshold))
    assert torch.equal(after[1:], before[1:])


def test_layers_of_other_head_counts_and_without_logits_go_together():
    model = nn.ModuleDict({"kda": nn.Linear(2, 2), "one": Attention(3), "two": Attention(5), "idle": Attention(2)})
    hidden = torch.randn(4, 6)
    seen = {name: model[name].measure(hidden).clone() for name in ("one", "two")}
    layers = attention_layers(model)
    assert layers.keys() == {"one", "two", "idle"}
    clipped = clip_query_key(layers, threshold=0.1)
    assert clipped.largest_logit.keys() == {"one", "two"}
    for name, logits in seen.items():
        assert torch.equal(clipped.largest_logit[name], logits)
    assert clipped.num_clipped == sum(int((logits > 0.1).sum()) for logits in seen.values())
    assert all(layer.largest_logit is None for layer in layers.values())


def test_the_maximum_over_ranks_decides_and_is_asked_for_once():
    layers = {"one": Attention(2), "two": Attention(3)}
    for layer in layers.values():
        layer.measure(torch.randn(4, 6) * 1e-3)
    before = layers["two"].query.detach().clone()
    calls = []

    def other_rank_saw_more(logits):
        calls.append(logits.numel())
        return torch.maximum(logits, torch.tensor([0.0, 0.0, 400.0, 0.0, 0.0]))

    clipped = clip_query_key(layers, threshold=100.0, reduce_max=other_rank_saw_more)
    assert calls == [5]
    assert clipped.smallest_factor == 0.25
    assert clipped.largest_logit["two"][0] == 400
    torch.testing.assert_close(layers["two"].query[0], before[0] * 0.5)
    assert torch.equal(layers["two"].query[1:], before[1:])


def test_a_model_without_attention_is_no_error():
    clipped = clip_query_key(attention_layers(nn.Linear(2, 2)), threshold=100.0)
    assert (clipped.largest_logit, clipped.num_clipped, clipped.smallest_factor) == ({}, 0, 1.0)
