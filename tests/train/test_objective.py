"""Which tokens a loss is about, and what formats its products are in."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from triax import machine
from triax.data.pack import Batch
from triax.model.decoder import Decoder
from triax.train.objective import cost, precision, targets_after_next


def test_the_token_after_the_next_stays_inside_its_sequence():
    targets = torch.tensor([11, 12, 13, 21, -100, 23, 31])
    assert targets_after_next(targets, (3, 0, 3, 1)).tolist() == [12, 13, -100, -100, -100, -100, -100]


@given(lengths=st.lists(st.integers(0, 5), max_size=5), seed=st.integers(0, 99))
def test_every_second_target_is_the_next_ones_target(lengths, seed):
    total = sum(lengths)
    targets = torch.randint(-1, 50, (total,), generator=torch.Generator().manual_seed(seed))
    targets[targets == -1] = -100
    actual, place = targets_after_next(targets, tuple(lengths)).tolist(), 0
    for length in lengths:
        for i in range(length):
            inside = i + 1 < length and targets[place + i] != -100
            assert actual[place + i] == (targets[place + i + 1].item() if inside else -100)
        place += length


class Products(TorchDispatchMode):
    """Collects the formats of what is multiplied."""

    def __init__(self):
        super().__init__()
        self.formats = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"):
            self.formats |= {x.dtype for x in args if isinstance(x, torch.Tensor) and x.dim() > 1}
        return func(*args, **(kwargs or {}))


def test_a_cpu_without_bf16_multiplies_nothing_in_bf16_and_learns_nearly_what_fp32_learns(t0, monkeypatch):
    monkeypatch.setattr(machine, "has_bf16", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    cpu, model, seen = torch.device("cpu"), Decoder(t0).train(), []
    tokens = torch.randint(t0.vocab_size, (65,), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:-1], tokens[1:], (40, 24))
    for kind in ("fp32", "bf16"):
        model.zero_grad()
        with Products() as products:
            with precision(kind, cpu):
                nats = cost(model, batch, cpu).nats
            nats.backward()
        assert products.formats == {torch.float32}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        seen.append((nats.detach(), gradients))
    (exact_nats, exact), (nats, rounded) = seen
    torch.testing.assert_close(nats, exact_nats, rtol=1e-3, atol=0)
    assert not torch.equal(nats, exact_nats)
    assert exact.keys() == rounded.keys()
    error = torch.stack([(rounded[name] - exact[name]).norm() / exact[name].norm() for name in exact])
    assert error.median() < 0.03
