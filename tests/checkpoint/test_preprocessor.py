"""The released limits of pictures and videos: read from the file, never assumed."""

import json

import pytest

from triax.checkpoint.preprocessor import FILE, parse_preprocessor, read_preprocessor
from triax.config.vision import Images, Videos
from triax.data.image import num_tokens
from triax.errors import ConfigError

K25 = {
    "in_patch_limit": 16384,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}
K3 = K25 | {
    "in_patch_limit": 65536,
    "transparent_bg_fill_stage": "after_resize",
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
}


def test_the_defaults_of_the_settings_are_those_of_the_files():
    assert parse_preprocessor(K3) == Videos()
    assert parse_preprocessor(K25) == Videos(images=Images(patch_limit=16384, board=None))


def test_limits_of_a_folder_decide_the_tokens(tmp_path):
    """U147: the limits of the model itself, not of the one before it, under which the same picture is a blur."""
    for table, tokens in ((K3, 143 * 108), (K25, 75 * 56)):
        (tmp_path / FILE).write_text(json.dumps({"auto_map": {}, "media_proc_cfg": table}))
        assert num_tokens(4000, 3000, read_preprocessor(tmp_path).images) == tokens


def test_a_flat_file_is_read_too(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(K3 | {"image_processor_type": "KimiK3ImageProcessor"}))
    assert read_preprocessor(tmp_path) == Videos()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fixed_output_tokens": 64}, "`fixed_output_tokens` is not supported; found `64`"),
        ({"image_mean": [0.48, 0.46, 0.41]}, "`image_mean` must be one number"),
        ({"in_patch_limits": 3}, "`in_patch_limits` is not a key of this family; nearest is `in_patch_limit`"),
        ({"transparent_bg_fill_stage": "before_resize"}, "only `after_resize` can be done"),
        ({"transparent_bg_config": {"pattern": "white"}}, "`pattern` is not supported; found `white`"),
        ({"patch_size": "14"}, "`patch_size` must be a whole number; found `'14'`"),
        ({"patch_size": 0}, "patch: Input should be greater than 0; found `0`"),
    ],
)
def test_what_cannot_be_done_is_refused(change, words):
    with pytest.raises(ConfigError) as refused:
        parse_preprocessor(K3 | change)
    assert words in str(refused.value)
    assert str(refused.value).startswith(FILE)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "not found"),
        ("{", "cannot be read as JSON"),
        ("[]", "must hold the table"),
        ('{"media_proc_cfg": 3}', "table"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_preprocessor(tmp_path)


def test_frames_have_the_limit_of_pictures_where_the_file_tells_none_of_their_own():
    assert parse_preprocessor({"in_patch_limit": 9999}).frame_patch_limit == 9999
    assert parse_preprocessor({"in_patch_limit": 9999, "in_patch_limit_each_frame": 77}).frame_patch_limit == 77
