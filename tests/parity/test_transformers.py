"""The same weights give the same numbers in an implementation that is not ours."""

import torch

from triax.checkpoint.released import load_released
from triax.model.layout import Layout

TOLERANCE = 1e-4  # of the largest value; float32 sums in another order


def assert_same(ours, theirs):
    assert ours.shape == theirs.shape
    assert torch.isfinite(theirs).all()
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    assert difference < TOLERANCE, f"relative difference {difference:.2e}"


def logits(model, tokens):
    """Our logits of a batch of equally long rows."""
    rows, length = tokens.shape
    return model.logits(model(tokens.flatten(), Layout.of([length] * rows))).unflatten(0, (rows, length))


def test_every_part_moves_the_logits(pair):
    """Weights at which a part made no difference would prove nothing about it."""
    ours, _ = pair
    tokens = torch.randint(96, (1, 16))
    last = {name.split(".", 2)[-1] if name.startswith("layers.") else name: name for name in ours.state_dict()}
    with torch.no_grad():
        base = logits(ours, tokens)
        for name in last.values():
            tensor = ours.state_dict()[name]
            kept = tensor.clone()
            tensor.add_(0.3 * torch.randn_like(tensor))
            moved = (logits(ours, tokens) - base).abs().max() / base.abs().max()
            tensor.copy_(kept)
            assert moved > 10 * TOLERANCE, name


def test_logits_of_whole_sequences_are_the_same(pair):
    ours, theirs = pair
    tokens = torch.randint(96, (3, 150))  # more than two chunks of 64, and no multiple
    with torch.no_grad():
        assert_same(logits(ours, tokens), theirs(input_ids=tokens, use_cache=False).logits)


def test_gradients_of_the_input_embeddings_are_the_same(pair):
    ours, theirs = pair
    tokens = torch.randint(96, (2, 70))
    pull = torch.randn(2, 70, 96)
    ours.zero_grad()
    theirs.zero_grad()
    (logits(ours, tokens) * pull).sum().backward()
    (theirs(input_ids=tokens, use_cache=False).logits * pull).sum().backward()
    assert_same(ours.embed.weight.grad, theirs.get_input_embeddings().weight.grad)


def test_gradients_of_every_weight_have_the_same_size(pair):
    """Names differ there (merged convolutions, stacked experts); the sum of squares does not."""
    ours, theirs = pair
    tokens, pull = torch.randint(96, (1, 33)), torch.randn(1, 33, 96)
    ours.zero_grad()
    theirs.zero_grad()
    (logits(ours, tokens) * pull).sum().backward()
    (theirs(input_ids=tokens, use_cache=False).logits * pull).sum().backward()

    def size(model):
        return (
            torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
        )

    assert_same(size(ours), size(theirs))


def test_decoding_with_a_cache_gives_the_same_logits(pair):
    ours, theirs = pair
    tokens = torch.randint(96, (2, 12))
    cache, memory = ours.empty_cache(2), None
    with torch.no_grad():
        for start, end in [(0, 5), (5, 6), (6, 7), (7, 8), (8, 12)]:
            piece = tokens[:, start:end]
            layout = Layout.of([end - start] * 2)
            found = ours.logits(ours(piece.flatten(), layout, cache)).unflatten(0, (2, end - start))
            output = theirs(input_ids=piece, cache=memory, use_cache=True)
            memory = output.cache
            assert_same(found, output.logits)
            assert_same(found, logits(ours, tokens[:, :end])[:, start:])


def test_rows_padded_on_the_left_there_are_packed_rows_here(pair):
    ours, theirs = pair
    lengths, longest = [9, 4, 7], 9
    rows = [torch.randint(96, (n,)) for n in lengths]
    padded = torch.stack([torch.cat([torch.zeros(longest - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - n).long() for n in lengths])
    with torch.no_grad():
        found = ours.logits(ours(torch.cat(rows), Layout.of(lengths)))
        output = theirs(
            input_ids=padded, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False
        )
    assert_same(found, output.logits[mask.bool()])


def test_what_transformers_saves_loads_here(pair, tmp_path):
    ours, theirs = pair
    theirs.save_pretrained(tmp_path)
    back = load_released(tmp_path)
    expected, found = ours.state_dict(), back.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert back.settings == ours.settings


def test_a_config_made_by_transformers_alone_loads_here(tmp_path):
    """Written without any of our keys: `mlp_layer_types` and `layer_types` instead of `first_k_dense_replace`."""
    from transformers import AutoModelForCausalLM, KimiLinearConfig

    shape = KimiLinearConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, linear_num_heads=2, linear_head_dim=8, pad_token_id=None,
        mlp_layer_types=["dense", "dense", "sparse"],
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(shape, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    ours = load_released(tmp_path).eval()
    assert (ours.settings.mla_layers, ours.settings.num_dense_layers) == ((1,), 2)
    tokens = torch.randint(96, (1, 20))
    with torch.no_grad():
        assert_same(logits(ours, tokens), theirs(input_ids=tokens, use_cache=False).logits)
