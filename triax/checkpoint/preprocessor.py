"""The released `preprocessor_config.json`: the limits and values by which pictures and videos become patches."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from triax.checkpoint.keys import Keys
from triax.config.vision import Chessboard, Images, Videos
from triax.errors import ConfigError

FILE = "preprocessor_config.json"


def read_preprocessor(folder: Path) -> Videos:
    """Read how a released model sees; pictures are in `.images`.

    Raises:
        ConfigError: The file is missing or damaged, or asks for something that cannot be done.

    Source: the files released with Kimi-K2.5 and Kimi-K3.
    """
    path = Path(folder) / FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; a model that sees is released with one; copy it there") from None
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path}: cannot be read as JSON; {problem}; copy it again") from None
    table = config.get("media_proc_cfg", config) if isinstance(config, dict) else None
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: must hold the table `media_proc_cfg`; found none; copy it again")
    return parse_preprocessor(table, str(path), is_strict=table is not config)


def parse_preprocessor(table: Mapping[str, Any], where: str = FILE, *, is_strict: bool = True) -> Videos:
    """Turn the table `media_proc_cfg` into settings; absent keys mean K3's pictures and K2.5's videos.

    Args:
        table: The parsed table.
        where: How errors call it.
        is_strict: Refuse unknown keys; a file without the inner table has keys of other programs beside these.

    Raises:
        ConfigError: A key is unknown, of the wrong type, or asks for something that cannot be done.
    """
    keys = Keys(table, where)
    try:
        videos = _settings(keys)
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {place}: {first['msg']}; found `{first['input']}`; correct it") from None
    if is_strict:
        keys.finish(frozenset({"config_type", "fixed_output_tokens_each_frame"}))
    return videos


def _settings(keys: Keys) -> Videos:
    images = Images(
        patch=keys.take("patch_size", int, 14),
        merge=_one(keys, "merge_kernel_size", 2),
        patch_limit=keys.take("in_patch_limit", int, 65536),
        side_limit=keys.take("patch_limit_on_one_side", int, 512),
        mean=_one(keys, "image_mean", 0.5),
        std=_one(keys, "image_std", 0.5),
        board=_board(keys),
    )
    keys.expect("fixed_output_tokens", None)
    keys.expect("max_num_frames_each_video", None)
    keys.expect("timestamp_mode", "hh:mm:ss.fff")
    return Videos(
        frames_per_s=keys.take("sample_fps", float, 2.0),
        clip_frames=keys.take("temporal_merge_kernel_size", int, 4),
        frame_patch_limit=keys.take("in_patch_limit_each_frame", int, images.patch_limit),
        patch_limit=keys.take("in_patch_limit_video", int, None),
        images=images,
    )


def _one(keys: Keys, name: str, default: float | int) -> Any:
    """Return a value that may be written once or for each channel or side."""
    value = keys.table.get(name, default)
    keys.taken.add(name)
    values = value if isinstance(value, list) else [value]
    if not values or any(type(one) not in (int, float) or one != values[0] for one in values):
        raise ConfigError(f"{keys.where}: `{name}` must be one number, or the same one throughout; found `{value}`")
    return values[0]


def _board(keys: Keys) -> Chessboard | None:
    stage = keys.take("transparent_bg_fill_stage", str, "before_resize")
    table = keys.take("transparent_bg_config", dict, None)
    if table is None:
        return None
    board = Keys(table, f"{keys.where}: transparent_bg_config")
    board.expect("pattern", "chessboard")
    board.expect("chessboard_square_on_top_left", True)
    if stage != "after_resize":
        raise ConfigError(
            f"{keys.where}: `transparent_bg_fill_stage` is not supported; found `{stage}`; "
            "only `after_resize` can be done"
        )
    made = Chessboard(
        square=board.take("chessboard_square_size", int, 16),
        light=board.take("chessboard_white_value", int, 255),
        grey=board.take("chessboard_gray_value", int, 200),
    )
    board.finish()
    return made
