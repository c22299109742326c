"""The decoder against the equations, and what must hold of every member of the family."""

import pytest
import torch

from triax.config.model import Model
from triax.errors import ConfigError
from triax.model.decoder import Decoder
from triax.model.layout import Layout
from triax.optim.groups import unstated

KINDS = ["k3", "kimi_linear", "k2", "full_residuals"]


def tokens_of(settings, count, seed=1):
    return torch.randint(0, settings.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def weights_of(model):
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items()}


def logits_and_gradient(model, tokens, layout, probe):
    logits = model.logits(model(tokens, layout))
    (gradient,) = torch.autograd.grad((logits * probe).sum(), model.embed.weight)
    return logits.detach(), gradient


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_input_gradients_equal_the_equations(kind, family, awake, equations):
    settings = family[kind]
    model = awake(settings)
    tokens = tokens_of(settings, 7)
    probe = torch.randn(7, settings.vocab_size, dtype=torch.float64)
    logits, gradient = logits_and_gradient(model, tokens, Layout.of([7]), probe)

    weights = weights_of(model)
    weights["embed.weight"].requires_grad_()
    expected = equations.logits(weights, weights["embed.weight"][tokens], settings)
    (expected_gradient,) = torch.autograd.grad((expected * probe).sum(), weights["embed.weight"])
    torch.testing.assert_close(logits, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-9)

    single = awake(settings, torch.float32)
    logits, gradient = logits_and_gradient(single, tokens, Layout.of([7]), probe.float())
    assert (logits - expected).norm() <= 1e-4 * expected.norm()
    assert (gradient - expected_gradient).norm() <= 1e-4 * expected_gradient.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_equal_separate_ones(kind, family, awake):
    settings, lengths = family[kind], [5, 3, 0, 9, 1]
    model = awake(settings)
    tokens = tokens_of(settings, sum(lengths))
    probe = torch.randn(sum(lengths), settings.vocab_size, dtype=torch.float64)
    packed, gradient = logits_and_gradient(model, tokens, Layout.of(lengths), probe)
    pieces = [
        logits_and_gradient(model, t, Layout.of([len(t)]), p)
        for t, p in zip(tokens.split(lengths), probe.split(lengths), strict=True)
        if len(t)
    ]
    torch.testing.assert_close(packed, torch.cat([logits for logits, _ in pieces]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, sum(g for _, g in pieces), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_never_sees_the_future_or_another_sequence(kind, family, awake):
    settings = family[kind]
    model = awake(settings)
    embedded = {}
    model.embed.register_forward_hook(lambda _, __, out: embedded.setdefault("x", out))
    hidden = model(tokens_of(settings, 12), Layout.of([7, 5]))
    (reach,) = torch.autograd.grad(hidden[4].square().sum() + hidden[9].square().sum(), embedded["x"])
    seen = reach.abs().sum(-1) > 0
    assert seen.tolist() == [True] * 5 + [False] * 2 + [True] * 3 + [False] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_tap_is_the_input_of_the_head_bit_for_bit(kind, family, awake):
    settings = family[kind]
    model, taps, read = awake(settings), {}, []
    tokens = tokens_of(settings, 6)
    for layer in model.layers:
        layer.attention_norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    hidden = model(tokens, Layout.of([6]), taps=taps)
    assert set(taps) == {*range(settings.num_layers + 1), "output"}
    assert torch.equal(taps["output"], hidden)
    assert torch.equal(taps[settings.num_layers], hidden)
    assert torch.equal(taps[0], model.embed(tokens))
    for i, value in enumerate(read):
        assert torch.equal(taps[i], value)


EDGES = {
    "one layer": {"num_layers": 1, "mla_layers": ()},
    "all kda": {"mla_layers": (), "mla": None},
    "all mla": {"mla_layers": (0, 1, 2, 3), "kda": None},
    "no residual mixes": {"residuals": None},
    "all dense": {"num_dense_layers": 4, "moe": None},
    "all routed": {"num_dense_layers": 0, "dense_dim": 0},
    "no shared expert": {"moe": {"num_shared_experts": 0}},
    "every expert chosen": {"moe": {"top_k": 8}},
    "one expert": {"moe": {"num_experts": 1, "top_k": 1}},
    "experts on the stream": {"moe": {"latent_dim": 0}},
    "no shared key part": {"mla": {"rope_dim": 0}},
    "one conv tap": {"kda": {"conv_kernel": 1}},
    "one layer a block": {"residuals": {"kind": "block", "block_layers": 1}},
    "a block longer than the model": {"residuals": {"kind": "block", "block_layers": 9}},
}


@pytest.mark.parametrize("edge", EDGES)
def test_every_legal_edge_of_the_settings_computes_the_equations(edge, t0, awake, equations):
    tree = t0.model_dump()
    for name, value in EDGES[edge].items():
        keep = isinstance(value, dict) and name != "residuals"
        tree[name] = tree[name] | value if keep else value
    settings = Model.model_validate(tree)
    model = awake(settings)
    tokens = tokens_of(settings, 4)
    logits = model.logits(model(tokens, Layout.of([4])))
    weights = weights_of(model)
    expected = equations.logits(weights, weights["embed.weight"][tokens], settings)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_a_model_can_train_after_it_ran_in_inference_mode(t0):
    model, tokens, layout = Decoder(t0), tokens_of(t0, 11), Layout.of([7, 4])
    with torch.inference_mode():
        model(tokens, layout)
        cache = model.empty_cache(2)
        model(tokens, layout, cache)
        model(tokens[:2], Layout.of([1, 1]), cache)
    model(tokens, layout).sum().backward()
    assert model.embed.weight.grad.isfinite().all()


def test_nothing_at_all_is_a_legal_stream(t0, awake):
    model = awake(t0)
    none = torch.zeros(0, dtype=torch.long)
    for lengths in ([], [0], [0, 0]):
        assert model(none, Layout.of(lengths)).shape == (0, t0.width)


def test_a_layout_that_does_not_cover_the_tokens_is_refused(t0, awake):
    with pytest.raises(ConfigError, match="found 4 places for 5 tokens"):
        awake(t0)(tokens_of(t0, 5), Layout.of([4]))


def test_a_double_model_is_double_throughout(t0, awake):
    model, seen = awake(t0), set()
    for module in model.modules():
        module.register_forward_hook(lambda _, __, out: seen.add(out.dtype) if isinstance(out, torch.Tensor) else None)
    model.logits(model(tokens_of(t0, 5), Layout.of([5])))
    assert seen == {torch.float64}


def test_half_precision_stays_close_to_fp32(t0, awake):
    tokens, layout = tokens_of(t0, 40), Layout.of([25, 15])
    exact = awake(t0)
    expected = exact(tokens, layout).detach()
    with torch.no_grad():
        cast = awake(t0, torch.bfloat16)(tokens, layout)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = awake(t0, torch.float32)(tokens, layout)
    for hidden in (cast, mixed):
        assert hidden.dtype is torch.bfloat16
        # the mean: a router decision that rounding flips moves single tokens
        error = (hidden.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.median() < 0.05


def test_training_in_bf16_gives_every_weight_an_fp32_gradient(t0):
    model = Decoder(t0).train()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(tokens_of(t0, 64), Layout.of([40, 24]))
        loss = model.logits(hidden).float().logsumexp(-1).sum()
    loss.backward()
    unread = {"layers.0.attention_mix.norm", "layers.0.attention_mix.query"}
    for name, parameter in model.named_parameters():
        if name not in unread:
            assert parameter.grad is not None, name
            assert parameter.grad.dtype is torch.float32
            assert parameter.grad.isfinite().all()


def test_fresh_matrices_are_normal_and_fresh_norms_are_one(t0):
    model = Decoder(t0)
    for name, tensor in model.named_parameters():
        if name.endswith(("norm.weight", "mix.norm")):
            assert (tensor == 1).all(), name
        elif name.endswith("mix.query"):
            assert (tensor == 0).all(), name
        elif tensor.dim() == 2 and tensor.numel() > 1000 and not name.endswith("_conv"):
            assert abs(tensor.std() / t0.init_std - 1) < 0.15, name
            assert abs(tensor.mean()) < 0.1 * t0.init_std, name


def test_the_model_states_its_matrices_and_leaves_the_rest_to_adamw(t0, kimi_linear):
    for settings in (t0, kimi_linear):
        model = Decoder(settings)
        stated = model.matrices()
        parameters = dict(model.named_parameters())
        assert set(stated) <= set(parameters)
        for name, rows in stated.items():
            height = parameters[name].flatten(0, -2).shape[0]
            assert height % sum(rows) == 0, name
        scalars = {"norm", "query", "decay_rate", "decay_bias", "query_conv", "key_conv", "value_conv"}
        small = ("attention.beta.weight", "norm.weight")
        for name in set(parameters) - set(stated):
            whole = name in {"embed.weight", "head.weight"}
            assert whole or name.endswith(small) or name.split(".")[-1] in scalars, name
        assert stated["layers.3.attention.latent_up.weight"] == (settings.mla.nope_dim, settings.mla.value_dim)
        assert stated["layers.0.attention.query.weight"] == (settings.kda.head_dim,)


def test_k3_is_laid_out_in_seconds_without_memory():
    settings = Model.model_validate(
        {
            "vocab_size": 163840,
            "width": 7168,
            "num_layers": 93,
            "mla_layers": (*range(3, 93, 4), 92),
            "num_dense_layers": 1,
            "dense_dim": 33792,
            "kda": {"num_heads": 96, "head_dim": 128},
            "mla": {
                "num_heads": 96,
                "q_latent_dim": 1536,
                "kv_latent_dim": 512,
                "nope_dim": 128,
                "rope_dim": 64,
                "value_dim": 128,
                "output_gate": True,
            },
            "moe": {
                "num_experts": 896,
                "top_k": 16,
                "num_shared_experts": 2,
                "expert_dim": 3072,
                "latent_dim": 3584,
            },
            "residuals": {"kind": "block", "block_layers": 12},
        }
    )
    with torch.device("meta"):
        model = Decoder(settings)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == 2_779_484_476_000


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_f61_a_compiled_decoder_computes_what_the_plain_one_does(t0):
    torch.manual_seed(0)
    model, tokens, layout = Decoder(t0), torch.randint(0, 512, (12,)), Layout.of([7, 5])
    compiled = torch.compile(model, backend="aot_eager")
    outcomes = []
    for network in (model, compiled):
        model.zero_grad()
        hidden = network(tokens, layout)
        hidden.square().sum().backward()
        outcomes.append((hidden.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(outcomes[1][0], outcomes[0][0])
    torch.testing.assert_close(outcomes[1][1], outcomes[0][1])


def test_f67_a_layer_that_does_not_know_the_stream_is_refused_with_advice(t0):
    model = Decoder(t0)
    model.layers[2] = torch.nn.Linear(t0.width, t0.width)
    with pytest.raises(ConfigError, match=r"layer 2 is a `Linear`.*`layers\[i\].mlp`, or subclass DecoderLayer"):
        model(torch.arange(5), Layout.of([5]))


@pytest.mark.parametrize("kind", ["k3", "kimi_linear", "k2", "full_residuals"])
def test_f67_every_layer_of_ours_says_which_matrices_it_has(family, kind):
    assert unstated(Decoder(family[kind])) == []
