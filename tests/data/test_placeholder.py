"""Pictures and clips in a prompt: as many slots as tokens, in text and in the chat encoders alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from triax.data.chat import k2, spell, xtml
from triax.data.image import read_image
from triax.data.placeholder import (
    PLACEHOLDER,
    clip_block,
    expand_placeholders,
    image_block,
    image_part,
    timestamp,
)
from triax.data.video import Clip
from triax.errors import DataError

PICTURES = [read_image(Image.new("RGB", size)) for size in ((60, 30), (28, 90))]
SIDE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_a_block_names_the_original_size_and_holds_one_slot_a_token():
    pads = "<|media_pad|>" * 6
    assert image_block(PICTURES[0]) == f"<|media_begin|>image 60x30<|media_content|>{pads}<|media_end|>"
    large = read_image(Image.new("RGB", (4000, 3000)))
    assert image_block(large).startswith("<|media_begin|>image 4000x3000<|media_content|>")
    assert image_block(large).count("<|media_pad|>") == 143 * 108 == large.num_tokens


def test_a_clip_names_the_time_of_its_first_frame():
    clip = Clip(torch.zeros(16, 3, 14, 14), (4, 2, 2), 3661.25, 1)
    assert clip_block(clip) == "01:01:01.250<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "00:00:00.000"), (59.9999, "00:00:59.999"), (3600.5, "01:00:00.500"), (1 / 3, "00:00:00.333")],
)
def test_times_are_cut_to_milliseconds(seconds, text):
    assert timestamp(seconds) == text


@given(pieces=st.lists(st.text(), min_size=1, max_size=4))
def test_each_placeholder_gets_its_block(pieces):
    pieces = [piece.replace(PLACEHOLDER, "") for piece in pieces]
    if PLACEHOLDER in "".join(pieces):
        return
    blocks = [f"[{number}]" for number in range(len(pieces) - 1)]
    expected = "".join(a + b for a, b in zip(pieces, [*blocks, ""], strict=True))
    assert expand_placeholders(PLACEHOLDER.join(pieces), blocks) == expected


@pytest.mark.parametrize(("text", "blocks"), [(f"{PLACEHOLDER} {PLACEHOLDER}", 1), (PLACEHOLDER, 2), ("", 1)])
def test_a_wrong_number_of_pictures_names_both_numbers(text, blocks):
    with pytest.raises(DataError, match=f"found {text.count(PLACEHOLDER)} of .* for {blocks} pictures"):
        expand_placeholders(text, ["block"] * blocks)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_chat_encoders_leave_as_many_slots_as_the_pictures_have_tokens(count):
    """U149: the prompt's length counts every slot, for 0, 1 and 2 pictures."""
    messages = [{"role": "user", "content": [*[SIDE] * count, {"type": "text", "text": f"what? {PLACEHOLDER}"}]}]
    images = [image_part(picture) for picture in PICTURES[:count]]
    pieces = xtml.segments(messages, images=images)
    slots = sum(segment.count for segment in pieces if segment.control and segment.text == "<|media_pad|>")
    assert slots == sum(picture.num_tokens for picture in PICTURES[:count])
    for picture in PICTURES[:count]:
        assert image_block(picture) in spell(pieces)
    slots = sum(s.count for s in k2.segments(messages, images=images) if s.control and s.text == "<|media_pad|>")
    assert slots == sum(picture.num_tokens for picture in PICTURES[:count])
