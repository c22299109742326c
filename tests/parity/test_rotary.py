"""The rotary frequencies of the released models, which differ in their stretching, against transformers."""

import json
from pathlib import Path

import pytest
import torch

from triax.checkpoint.published import parse
from triax.model.rotary import frequencies, magnitude

FOLDER = Path(__file__).parents[1] / "checkpoint" / "published"


@pytest.mark.parametrize("name", ["kimi_k2", "kimi_k25", "moonlight"])
def test_frequencies_and_temperature_are_the_same(name):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = json.loads((FOLDER / f"{name}.json").read_text())
    text = {
        k: v for k, v in config.get("text_config", config).items() if k not in ("model_type", "quantization_config")
    }
    rope, mla = parse(config).settings.mla.rope, parse(config).settings.mla
    theirs = DeepseekV3RotaryEmbedding(DeepseekV3Config(**text))
    torch.testing.assert_close(torch.tensor(frequencies(rope, mla.rope_dim)), theirs.inv_freq, rtol=1e-6, atol=0)
    yarn = rope.yarn
    ours = 1.0 if yarn is None else magnitude(yarn, yarn.mscale) / magnitude(yarn, yarn.mscale_all_dim)
    assert ours == pytest.approx(theirs.attention_scaling)
    with torch.device("meta"):
        scale = DeepseekV3Attention(DeepseekV3Config(**text), 0).scaling
    stretch = 1.0 if yarn is None else magnitude(yarn, yarn.mscale_all_dim)
    assert scale == pytest.approx((mla.nope_dim + mla.rope_dim) ** -0.5 * stretch**2)
