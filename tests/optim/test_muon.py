import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from triax.config.optim import MuonClip
from triax.kernels.newton_schulz import reference
from triax.optim import Optimizer, build

PLAIN = MuonClip(lr=0.02, clip_norm=0, qk_clip=None)


class Toy(nn.Module):
    """Named weights with stated patterns; the loss is linear, so each gradient is what the test says."""

    def __init__(self, seed=0, dtype=torch.float32, **weights):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.patterns = {}
        for name, (shape, pattern) in weights.items():
            weight = torch.randn(*shape, generator=random, dtype=torch.float64)
            setattr(self, name, nn.Parameter(weight.to(dtype)))
            if pattern:
                self.patterns[name] = pattern

    def matrices(self):
        return self.patterns

    def push(self, seed=0):
        random = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            weight.grad = torch.randn(*weight.shape, generator=random, dtype=torch.float64).to(weight.dtype)


def definition(weight, gradients, settings, rate=1.0):
    """One whole matrix moved by the equations of Moonlight section 2, in fp64."""
    weight, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        momentum = settings.momentum * momentum + gradient
        ahead = settings.momentum * momentum + gradient if settings.nesterov else momentum
        update = reference.orthogonalize(ahead, settings.newton_schulz_steps)
        scale = settings.update_rms * max(weight.shape) ** 0.5
        weight = weight - settings.lr * rate * (scale * update + settings.weight_decay * weight)
    return weight


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (4, 40)])
def test_a_whole_matrix_equals_torch_s_muon(shape, nesterov):
    settings = PLAIN.model_copy(update={"nesterov": nesterov})
    ours, theirs = (Toy(weight=(shape, (shape[0],))) for _ in range(2))
    muon = Optimizer(ours, settings, newton_schulz_dtype=torch.bfloat16)
    torch_muon = torch.optim.Muon(theirs.parameters(), 0.02, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        before = ours.weight.detach().clone()
        for toy in (ours, theirs):
            toy.push(seed=step)
        muon.step()
        torch_muon.step()
        moved = (ours.weight - before).norm()
        assert (ours.weight - theirs.weight).norm() / moved < 8 * torch.finfo(torch.bfloat16).eps


@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 6),
    columns=st.integers(1, 12),
    copies=st.integers(1, 3),
    nesterov=st.booleans(),
)
def test_every_logical_matrix_moves_as_if_it_were_alone(seed, rows, columns, copies, nesterov):
    settings = PLAIN.model_copy(update={"nesterov": nesterov})
    toy = Toy(
        seed,
        torch.float64,
        heads=((copies * rows, columns), (rows,)),
        pairs=((copies * (rows + 2), columns), (rows, 2)),
        experts=((copies, rows, columns), (rows,)),
    )
    optimizer = build(toy, settings)
    start = {name: weight.detach().clone() for name, weight in toy.named_parameters()}
    gradients = []
    for step in range(2):
        toy.push(seed + step)
        gradients.append({name: weight.grad.clone() for name, weight in toy.named_parameters()})
        optimizer.step(0.5)
    cuts = {
        "heads": lambda t: t.split([rows] * copies),
        "pairs": lambda t: t.split([rows, 2] * copies),
        "experts": lambda t: t.unbind(),
    }
    for name, cut in cuts.items():
        found = cut(dict(toy.named_parameters())[name])
        steps = zip(*(cut(gradient[name]) for gradient in gradients), strict=True)
        for weight, pushes, moved in zip(cut(start[name]), steps, found, strict=True):
            torch.testing.assert_close(moved, definition(weight, pushes, settings, 0.5))


def test_a_louder_head_leaves_the_other_heads_updates_bitwise_alone():
    results = []
    for loudness in (1, 30):
        toy = Toy(query=((12, 32), (3,)), other=((6, 32), (3,)))
        optimizer = build(toy, PLAIN)
        for step in range(3):
            toy.push(step)
            toy.query.grad[3:6] *= loudness
            optimizer.step()
        results.append(toy)
    quiet, loud = results
    assert torch.equal(quiet.query[:3], loud.query[:3])
    assert torch.equal(quiet.query[6:], loud.query[6:])
    assert torch.equal(quiet.other, loud.other)


def test_heads_move_by_equal_amounts_whatever_their_gradients():
    toy = Toy(query=((24, 32), (3,)))
    before = toy.query.detach().clone()
    toy.push()
    toy.query.grad *= torch.logspace(0, 1.5, 8).repeat_interleave(3)[:, None]
    build(toy, PLAIN.model_copy(update={"weight_decay": 0.0})).step()
    moved = (toy.query.detach() - before).view(8, -1).square().mean(1).sqrt()
    assert moved.max() / moved.min() < 1.5  # the gradients differ by 31


def test_fused_and_separate_matrices_end_with_identical_weights():
    fused = Toy(both=((10, 16), (4, 6)))
    apart = Toy(gate=((4, 16), (4,)), up=((6, 16), (6,)))
    with torch.no_grad():
        apart.gate.copy_(fused.both[:4])
        apart.up.copy_(fused.both[4:])
    optimizers = [build(fused, PLAIN), build(apart, PLAIN)]
    for step in range(3):
        fused.push(step)
        apart.gate.grad, apart.up.grad = fused.both.grad[:4].clone(), fused.both.grad[4:].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(fused.both, torch.cat([apart.gate, apart.up]))


def test_the_update_has_the_promised_size_and_reports_it():
    toy = Toy(wide=((8, 64), (8,)), pairs=((12, 16), (2, 4)))
    optimizer = Optimizer(toy, PLAIN.model_copy(update={"weight_decay": 0.0}))
    before = {name: weight.detach().clone() for name, weight in toy.named_parameters()}
    toy.push()
    optimizer.step(0.5)
    for name, rms in optimizer.update_rms().items():
        moved = dict(toy.named_parameters())[name].detach() - before[name]
        assert rms == pytest.approx(float(moved.square().mean().sqrt()) / 0.01, rel=1e-3)
        assert 0.1 < rms < 0.25


def test_the_counter_is_steps_times_matrices():
    toy = Toy(heads=((12, 8), (3,)), pairs=((12, 8), (2, 4)), experts=((5, 3, 8), (3,)), norm=((8,), ()))
    optimizer = build(toy, PLAIN)
    for step in range(3):
        toy.push(step)
        assert optimizer.step().num_orthogonalized == 4 + 4 + 5
    assert optimizer.num_orthogonalized == 3 * sum(role.num_matrices for role in optimizer.roles.values()) == 39


@settings(max_examples=5)
@given(limit=st.sampled_from([1, 64, 100, 200]))
def test_stacking_in_portions_changes_nothing(limit):
    results = []
    for size in (1 << 26, limit):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("triax.optim.muon.STACK_ELEMENTS", size)
            toy = Toy(a=((12, 8), (4,)), b=((4, 8), (4,)), c=((8, 8), (4,)))
            toy.push()
            assert build(toy, PLAIN).step().num_orthogonalized == 6
        results.append(torch.cat(list(toy.parameters())))
    torch.testing.assert_close(*results)


def test_zero_gradients_still_decay_but_missing_ones_leave_the_weight_alone():
    toy = Toy(zero=((4, 4), (4,)), missing=((4, 4), (4,)))
    zero, missing = toy.zero.detach().clone(), toy.missing.detach().clone()
    toy.zero.grad = torch.zeros(4, 4)
    build(toy, PLAIN).step()
    assert torch.equal(toy.missing, missing)
    torch.testing.assert_close(toy.zero, zero * (1 - 0.02 * 0.1))
