"""The tower: its equations written a second time, whole items, and nothing between items."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triax.config.vision import Vision
from triax.errors import ConfigError
from triax.model.media import MediaEncoder
from triax.model.vision import Media

SMALL = {"width": 16, "num_layers": 3, "num_heads": 3, "head_dim": 8, "mlp_dim": 20, "patch": 2, "slot_token": 7}
K3 = Vision.model_validate(SMALL | {"table_rows": 6, "table_columns": 5})
K25 = K3.model_copy(
    update={"norm": "layer", "norm_eps": 1e-5, "bias": True, "resize": "bicubic", "projector": "norm_before"}
)
WIDTH = 24
FORMS = pytest.mark.parametrize("settings", [K3, K25], ids=["k3", "k25"])


def encoder(settings=K3, seed=0, dtype=torch.float64):
    """Tower and projector in which no weight is zero, one or equal to its neighbour."""
    torch.manual_seed(seed)
    made = MediaEncoder(settings, WIDTH, 0.02).double()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            spread = 0.3 if name.endswith("bias") else weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.2
            weight.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, spread)
        made.tower.position.normal_()
    return made.to(dtype)


def media(*grids, seed=0, dtype=torch.float64, side=2):
    noise = torch.Generator().manual_seed(seed)
    size = (sum(math.prod(grid) for grid in grids), 3, side, side)
    return Media(torch.randn(size, generator=noise, dtype=dtype), grids)


def item(stream, number):
    """One item of a stream by itself."""
    sizes = [math.prod(grid) for grid in stream.grids]
    return Media(stream.patches.split(sizes)[number], (stream.grids[number],))


# The published equations once more, in float64 and without the package's code.


def rms(x, weight, eps):
    return x / (x * x).mean(-1, keepdim=True).add(eps).sqrt() * weight


def weigh_table(table, rows, columns):
    """Bilinear weights by the definition: centres of cells, no corners aligned, clamped at the edge."""
    out = torch.zeros(rows, columns, table.shape[-1], dtype=torch.float64)
    for i in range(rows):
        for j in range(columns):
            y = max((i + 0.5) * table.shape[0] / rows - 0.5, 0.0)
            x = max((j + 0.5) * table.shape[1] / columns - 0.5, 0.0)
            top, left = int(y), int(x)
            down, right = min(top + 1, table.shape[0] - 1), min(left + 1, table.shape[1] - 1)
            fall, shift = y - top, x - left
            upper = table[top, left] * (1 - shift) + table[top, right] * shift
            lower = table[down, left] * (1 - shift) + table[down, right] * shift
            out[i, j] = upper * (1 - fall) + lower * fall
    return out


def transcription(w, stream, settings):
    """K3's tower and projector item by item; returns the stream after each step and the tokens."""
    heads, dim, width = settings.num_heads, settings.head_dim, settings.width
    steps: dict[str, list] = {}
    for number, (frames, rows, columns) in enumerate(stream.grids):
        patches = item(stream, number).patches
        x = torch.einsum("nchw,dchw->nd", patches, w["tower.patch.weight"])
        place = weigh_table(w["tower.position"], rows, columns).reshape(rows * columns, width)
        angles = []
        extra = []
        for frame in range(frames):
            clock = [frame * 10000 ** (-j / (width / 2)) for j in range(width // 2)]
            clock = torch.tensor([math.sin(a) for a in clock] + [math.cos(a) for a in clock], dtype=torch.float64)
            extra.append(place + clock if frames > 1 else place)
            for row in range(rows):
                for column in range(columns):
                    turn = [10000 ** (-4 * j / dim) for j in range(dim // 4)]
                    angles.append([value * f for f in turn for value in (column, row)])
        x = x + torch.cat(extra)
        spin = torch.polar(torch.ones(len(angles), dim // 2).double(), torch.tensor(angles, dtype=torch.float64))
        steps.setdefault("vision.embed", []).append(x)
        for layer in range(settings.num_layers):
            at = f"tower.layers.{layer}"
            y = rms(x, w[f"{at}.attention_norm.weight"], settings.norm_eps)
            qkv = (y @ w[f"{at}.attention.query_key_value.weight"].T).reshape(-1, 3, heads, dim)
            query, key = (
                torch.view_as_real(
                    torch.view_as_complex(qkv[:, part].reshape(-1, heads, dim // 2, 2).contiguous()) * spin[:, None]
                ).flatten(-2)
                for part in (0, 1)
            )
            share = (torch.einsum("qhd,khd->hqk", query, key) * dim**-0.5).softmax(-1)
            read = torch.einsum("hqk,khd->qhd", share, qkv[:, 2]).flatten(1)
            x = x + read @ w[f"{at}.attention.output.weight"].T
            y = rms(x, w[f"{at}.mlp_norm.weight"], settings.norm_eps) @ w[f"{at}.mlp.up.weight"].T
            y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            x = x + y @ w[f"{at}.mlp.down.weight"].T
            steps.setdefault(f"vision.{layer}", []).append(x)
        x = rms(x, w["tower.output_norm.weight"], settings.norm_eps)
        steps.setdefault("vision.norm", []).append(x)
        x = x.reshape(frames, rows, columns, width).mean(0)
        merged = torch.stack(
            [
                torch.stack([x[r, c], x[r, c + 1], x[r + 1, c], x[r + 1, c + 1]])
                for r in range(0, rows, 2)
                for c in range(0, columns, 2)
            ]
        )
        steps.setdefault("vision.merged", []).append(merged)
        y = merged.flatten(1) @ w["projector.inner.weight"].T
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2))) @ w["projector.output.weight"].T
        steps.setdefault("vision.tokens", []).append(rms(y, w["projector.norm.weight"], settings.projector_eps))
    return {name: torch.cat(parts) for name, parts in steps.items()}


@pytest.mark.parametrize("grids", [[(1, 4, 4)], [(1, 32, 32)], [(1, 2, 10), (4, 6, 4), (1, 6, 5 + 1), (2, 2, 2)]])
def test_every_step_equals_the_equations(grids):
    """U152: a port is compared step by step, not by its result only; non-square grids and clips included."""
    model, stream, taps = encoder(), media(*grids), {}
    with torch.no_grad():
        tokens = model(stream, taps)
        expected = transcription(model.state_dict(), stream, K3)
    assert list(taps) == list(expected) == ["vision.embed", *[f"vision.{i}" for i in range(3)], *list(expected)[-3:]]
    for name, value in expected.items():
        torch.testing.assert_close(taps[name], value, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(tokens, expected["vision.tokens"])


def test_gradients_equal_those_of_the_equations():
    model, stream = encoder(), media((3, 2, 4), (1, 4, 4))
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    expected = transcription(weights, stream, K3)["vision.tokens"]
    pull = torch.randn_like(expected)
    (expected * pull).sum().backward()
    (model(stream) * pull).sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, weights[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def test_the_whole_tower_has_the_published_size():
    with torch.device("meta"):
        model = MediaEncoder(Vision(), 7168, 0.02)
    assert sum(weight.numel() for weight in model.tower.parameters()) == 401_214_464
    assert sum(weight.numel() for weight in model.projector.parameters()) == 46_144_512


@FORMS
@given(
    grids=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from([2, 4, 6]), st.sampled_from([2, 4])), min_size=2, max_size=4
    ),
    seed=st.integers(0, 99),
)
def test_an_item_does_not_depend_on_its_neighbours_or_its_place(settings, grids, seed):
    """U148, U150: items of different shape, in any order and company, give the tokens they give alone."""
    model, stream = encoder(settings), media(*grids, seed=seed)
    order = torch.randperm(len(grids), generator=torch.Generator().manual_seed(seed)).tolist()
    alone = [item(stream, number) for number in range(len(grids))]
    shuffled = Media(torch.cat([alone[n].patches for n in order]), tuple(grids[n] for n in order))
    with torch.no_grad():
        expected = torch.cat([model(alone[number]) for number in order])
        torch.testing.assert_close(model(shuffled), expected)


@FORMS
def test_no_clip_sees_another_but_all_frames_of_a_clip_see_each_other(settings):
    """U150: the second clip's last frame changes every token of that clip and none of the first."""
    model, stream = encoder(settings), media((3, 2, 4), (3, 2, 4))
    changed = stream.patches.clone()
    changed[-1] += 1
    with torch.no_grad():
        before, after = model(stream), model(stream._replace(patches=changed))
    assert torch.equal(before[:2], after[:2])
    assert ((before[2:] - after[2:]).abs().amax(-1) > 1e-6).all()


@FORMS
def test_one_frame_of_a_video_is_a_picture_and_more_frames_cost_no_tokens(settings):
    """U150: one frame has no clock, so it equals the picture; the number of tokens is that of one frame."""
    model = encoder(settings)
    picture = media((1, 4, 6))
    clip = Media(picture.patches.repeat(3, 1, 1, 1), ((3, 4, 6),))
    with torch.no_grad():
        taps, clip_taps = {}, {}
        tokens, pooled = model(picture, taps), model(clip, clip_taps)
    place = taps["vision.embed"] - model.tower.patch(picture.patches)
    torch.testing.assert_close(place, weigh_or_resize(model, 4, 6))
    assert len(tokens) == len(pooled) == 6 == settings.num_tokens(4, 6)
    assert not torch.allclose(clip_taps["vision.embed"][:24], taps["vision.embed"])  # frame 0 of a clip has a clock
    assert not torch.allclose(tokens, pooled)


def weigh_or_resize(model, rows, columns):
    table = model.tower.position.detach()
    if model.settings.resize == "bilinear":
        return weigh_table(table, rows, columns).flatten(0, 1)
    image = torch.nn.functional.interpolate(table.permute(2, 0, 1)[None], size=(rows, columns), mode="bicubic")
    return image[0].permute(1, 2, 0).flatten(0, 1)


def test_a_grid_of_the_tables_size_takes_the_table_as_it_is():
    settings = K3.model_copy(update={"table_rows": 4, "table_columns": 6})
    model, picture, taps = encoder(settings), media((1, 4, 6)), {}
    with torch.no_grad():
        model(picture, taps)
        place = taps["vision.embed"] - model.tower.patch(picture.patches)
    torch.testing.assert_close(place, model.tower.position.flatten(0, 1), rtol=0, atol=1e-14)


@FORMS
def test_a_stream_without_items_gives_every_weight_a_zero_gradient(settings):
    """U122: a process whose batch has no picture runs the same layers as the others."""
    model = encoder(settings, dtype=torch.float32)
    tokens = model(Media(torch.zeros(0, 3, 2, 2), ()))
    assert tokens.shape == (0, WIDTH)
    tokens.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


@FORMS
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_stays_near_float64(settings, autocast):
    exact, stream = encoder(settings), media((1, 4, 4), (2, 4, 6))
    model = encoder(settings, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        tokens = model(Media(stream.patches.float(), stream.grids))
    with torch.no_grad():
        expected = exact(stream)
    assert tokens.dtype is torch.bfloat16
    assert ((tokens.double() - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize(
    ("grids", "patches", "words"),
    [
        (((1, 4, 4),), 15, "1 grids need 16 patches of [3, 2, 2]; found `[15, 3, 2, 2]`"),
        (((1, 3, 4),), 12, "rows and columns in multiples of 2; found `(1, 3, 4)` for item 0"),
        (((1, 2, 2), (5, 2, 2)), 24, "1 to 4 frames and rows and columns in multiples of 2; found `(5, 2, 2)`"),
        (((0, 2, 2),), 0, "found `(0, 2, 2)` for item 0"),
    ],
)
def test_grids_that_do_not_fit_are_refused(grids, patches, words):
    with pytest.raises(ConfigError, match=r"^model\.vision: ") as refused:
        encoder()(Media(torch.zeros(patches, 3, 2, 2, dtype=torch.float64), grids))
    assert words in str(refused.value)
