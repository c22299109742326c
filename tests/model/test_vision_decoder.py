"""Pictures and clips inside the decoder: slots, features, gradients, caches and processes without pictures."""

import math
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from triax.config.load import load_model
from triax.config.model import Model
from triax.config.optim import MuonClip
from triax.config.vision import Vision
from triax.errors import ConfigError
from triax.model.count import sheet, tree, weights
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.model.vision import Media
from triax.optim.build import build
from triax.optim.groups import unstated
from triax.train.groups import group_of

SLOT = 7
VISION = {"width": 16, "num_layers": 2, "num_heads": 2, "head_dim": 8, "mlp_dim": 20, "patch": 2, "slot_token": SLOT}
VISION |= {"table_rows": 4, "table_columns": 4}
K25 = {"norm": "layer", "norm_eps": 1e-5, "bias": True, "resize": "bicubic", "projector": "norm_before"}


@pytest.fixture(scope="module")
def seeing(t0) -> Model:
    return Model.model_validate(t0.model_dump() | {"vision": VISION})


def media(*grids, seed=0, dtype=torch.float64):
    noise = torch.Generator().manual_seed(seed)
    return Media(torch.randn(sum(map(prod, grids)), 3, 2, 2, generator=noise, dtype=dtype), grids)


def prompt(*runs, text=3, seed=0):
    """Text around runs of slots."""
    noise = torch.Generator().manual_seed(seed)
    parts = [torch.randint(8, 500, (text,), generator=noise)]
    for run in runs:
        parts += [torch.full((run,), SLOT), torch.randint(8, 500, (text,), generator=noise)]
    return torch.cat(parts)


def test_features_stand_where_the_slots_are_and_nowhere_else(seeing, awake):
    model, stream, tokens = awake(seeing), media((1, 2, 4), (2, 4, 6)), prompt(2, 6)
    taps = {}
    with torch.no_grad():
        model(tokens, Layout.of([len(tokens)]), taps=taps, media=stream)
        features = model.vision(stream)
    embedded, is_slot = taps[0], tokens == SLOT
    torch.testing.assert_close(embedded[is_slot], features)
    torch.testing.assert_close(embedded[~is_slot], model.embed(tokens[~is_slot]).detach())
    assert {"vision.embed", "vision.0", "vision.1", "vision.norm", "vision.merged", "vision.tokens"} <= taps.keys()


def test_sequences_of_a_batch_see_only_their_own_pictures(seeing, awake):
    model, stream = awake(seeing), media((1, 4, 4), (3, 2, 2), (1, 2, 6))
    rows = [prompt(4, seed=1), prompt(seed=2), prompt(1, 3, seed=3)]
    own = [media_of(stream, [0]), None, media_of(stream, [1, 2])]
    with torch.no_grad():
        whole = model(torch.cat(rows), Layout.of([len(row) for row in rows]), media=stream)
        apart = [model(row, Layout.of([len(row)]), media=one) for row, one in zip(rows, own, strict=True)]
    torch.testing.assert_close(whole, torch.cat(apart))


def media_of(stream, numbers):
    parts = stream.patches.split([prod(grid) for grid in stream.grids])
    return Media(torch.cat([parts[n] for n in numbers]), tuple(stream.grids[n] for n in numbers))


def test_runs_that_touch_at_a_border_of_sequences_are_two_runs(seeing, awake):
    model, stream = awake(seeing), media((1, 2, 2), (1, 2, 4))
    with torch.no_grad():
        whole = model(torch.tensor([9, SLOT, SLOT, SLOT, 10]), Layout.of([2, 3]), media=stream)
        last = model(torch.tensor([SLOT, SLOT, 10]), Layout.of([3]), media=media_of(stream, [1]))
    torch.testing.assert_close(whole[2:], last)


@pytest.mark.parametrize(
    ("runs", "grids", "words"),
    [
        ((2, 2), [(1, 2, 4)], "2 runs of [2, 2] = 4 slots for 1 items of [2] = 2 tokens"),
        ((2,), [(1, 2, 4), (1, 2, 4)], "1 runs of [2] = 2 slots for 2 items of [2, 2] = 4 tokens"),
        ((2, 3), [(1, 2, 6), (1, 2, 4)], "2 runs of [2, 3] = 5 slots for 2 items of [3, 2] = 5 tokens"),
        ((8,), [(4, 2, 4)], "1 runs of [8] = 8 slots for 1 items of [2] = 2 tokens"),
        ((3,), [], "1 runs of [3] = 3 slots for 0 items of [] = 0 tokens"),
    ],
    ids=["more slots", "more pictures", "swapped sizes", "a slot for each frame", "no pictures"],
)
def test_slots_and_features_that_disagree_are_named_in_both_numbers(seeing, awake, runs, grids, words):
    """U151: placeholders 2, images 1, and the reverse; sizes that only agree in sum."""
    tokens = prompt(*runs)
    with pytest.raises(ConfigError, match="one run of slots") as refused:
        awake(seeing)(tokens, Layout.of([len(tokens)]), media=media(*grids) if grids else None)
    assert words in str(refused.value)


def test_a_text_model_refuses_pictures(t0, awake):
    tokens = prompt(2)
    with pytest.raises(ConfigError, match="reads text only; found 1 pictures"):
        awake(t0)(tokens, Layout.of([len(tokens)]), media=media((1, 2, 4)))


def test_a_text_model_may_use_the_slot_token_as_any_other(t0, awake):
    assert awake(t0)(prompt(2), Layout.of([8])).isfinite().all()


def test_a_slot_outside_the_vocabulary_is_refused(t0):
    with pytest.raises(ValueError, match="slot_token is `163605` but vocab_size is `512`"):
        Model.model_validate(t0.model_dump() | {"vision": {}})


def test_text_gives_the_tower_a_zero_gradient_and_changes_nothing(seeing, t0, awake):
    model, plain, tokens = awake(seeing), awake(t0), prompt(text=6)
    plain.load_state_dict({name: w for name, w in model.state_dict().items() if not name.startswith("vision.")})
    layout = Layout.of([6])
    hidden = model(tokens, layout)
    torch.testing.assert_close(hidden, plain(tokens, layout))
    hidden.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.vision.parameters())


def test_text_does_not_run_the_tower_where_nothing_is_learnt(seeing, awake):
    model, ran = awake(seeing), []
    model.vision.tower.register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad():
        model(prompt(text=6), Layout.of([6]))
    model.vision.requires_grad_(False)
    model(prompt(text=6), Layout.of([6]))
    assert not ran
    model.vision.requires_grad_(True)
    model(prompt(text=6), Layout.of([6]))
    assert ran


@pytest.mark.parametrize("form", [{}, K25], ids=["k3", "k25"])
def test_a_loss_on_text_moves_every_weight_of_the_tower(t0, awake, form):
    model = awake(Model.model_validate(t0.model_dump() | {"vision": VISION | form}))
    tokens = prompt(2, 6)
    hidden = model.forward_training(tokens, tokens, Layout.of([len(tokens)]), media((1, 2, 4), (2, 4, 6))).hidden
    (hidden * torch.randn_like(hidden)).sum().backward()
    still = {name for name, weight in model.vision.named_parameters() if not weight.grad.any()}
    assert not still


def test_prefill_with_pictures_and_decoding_equals_the_whole(seeing, awake):
    model, stream, tokens = awake(seeing), media((1, 2, 4), (1, 4, 4)), prompt(2, 4, text=4)
    cut = 9  # after the first picture and before the second
    with torch.no_grad():
        whole = model(tokens, Layout.of([len(tokens)]), media=stream)
        cache = model.empty_cache(1)
        parts = [model(tokens[:cut], Layout.of([cut]), cache, media=media_of(stream, [0]))]
        parts.append(model(tokens[cut:-2], Layout.of([len(tokens) - cut - 2]), cache, media=media_of(stream, [1])))
        parts += [model(tokens[-2:-1], Layout.of([1]), cache), model(tokens[-1:], Layout.of([1]), cache)]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_the_sheet_lists_what_a_model_with_a_tower_holds(seeing, t0):
    for settings in (seeing, Model.model_validate(t0.model_dump() | {"vision": VISION | K25})):
        with torch.device("meta"):
            built = {name: tuple(tensor.shape) for name, tensor in Decoder(settings).state_dict().items()}
        listed = {weight.name: weight.shape for weight in weights(settings)}
        assert listed == built
        counted = sheet(settings)
        assert counted.active_parameters == sheet(t0).active_parameters
        assert counted.parameters - sheet(t0).parameters == counted.parameters_by_part["vision"] > 0
        assert any("vision" in line for line in tree(settings))


def test_k3_with_its_tower_has_the_published_totals():
    k3 = load_model("k3").model_copy(update={"vision": Vision()})
    counted = sheet(k3)
    assert counted.parameters == 2_779_931_834_976
    assert counted.active_parameters == 104_189_612_640
    assert counted.num_tensors == 249_756 + 168


def test_gradient_norms_of_the_tower_stand_apart(seeing):
    with torch.device("meta"):
        names = [name for name, _ in Decoder(seeing).named_parameters()]
    assert {group_of(name, seeing) for name in names if name.startswith("vision.")} == {"vision"}
    assert "vision" not in {group_of(name, seeing) for name in names if not name.startswith("vision.")}


def test_a_frozen_tower_has_no_optimiser_state(seeing):
    """U123: text-only training pays nothing for the tower."""
    model = Decoder(seeing)
    model.vision.requires_grad_(False)
    optimizer = build(model, MuonClip())
    tokens = prompt(text=6)
    model(tokens, Layout.of([6])).square().sum().backward()
    optimizer.step(1e-3)
    assert not [name for name in optimizer.parameters if name.startswith("vision.")]
    assert all(weight.grad is None for weight in model.vision.parameters())


def _train_two(rank, settings, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=path.with_name("meeting").as_uri(), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Decoder(Model.model_validate(settings)).double()
    gradients = []
    for step in range(3):
        model.zero_grad(set_to_none=True)
        _loss(model, step, has_picture=rank == step % 2).backward()
        for weight in model.vision.parameters():  # a missing gradient would leave the other process waiting
            dist.all_reduce(weight.grad)
        gradients.append([weight.grad.clone() for weight in model.vision.parameters()])
    if rank == 0:
        torch.save(gradients, path)
    dist.destroy_process_group()


def _loss(model, step, *, has_picture):
    tokens = prompt(2, seed=step) if has_picture else prompt(text=8, seed=step)
    hidden = model(tokens, Layout.of([len(tokens)]), media=media((1, 2, 4), seed=step) if has_picture else None)
    pull = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    return (hidden * pull).sum()


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that threads may hold locks while it forks
def test_processes_without_pictures_keep_step_with_the_others(seeing, tmp_path):
    """U122: two processes, pictures on one of them in turn, three steps."""
    path, context = tmp_path / "gradients.pt", mp.get_context("fork")
    workers = [context.Process(target=_train_two, args=(r, seeing.model_dump(), path)) for r in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
        worker.kill()
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    torch.manual_seed(0)
    alone = Decoder(seeing).double()
    for step, gradients in enumerate(torch.load(path)):
        alone.zero_grad(set_to_none=True)
        (_loss(alone, step, has_picture=True) + _loss(alone, step, has_picture=False)).backward()
        for weight, gradient in zip(alone.vision.parameters(), gradients, strict=True):
            torch.testing.assert_close(weight.grad, gradient)
            assert math.isfinite(float(weight.grad.sum()))
            assert weight.grad.any()


@pytest.mark.parametrize("form", [{}, K25], ids=["k3", "k25"])
def test_f67_a_tower_says_that_it_has_no_matrices_for_muon(t0, form):
    assert unstated(Decoder(Model.model_validate(t0.model_dump() | {"vision": VISION | form}))) == []
