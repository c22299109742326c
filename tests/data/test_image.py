"""Pictures: the released sizes and pixels, every mode and orientation, and files that are no pictures."""

import ast
import importlib.util
import math
import struct
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageSequence

from triax.config.vision import Images
from triax.data.image import fit, lay_out, num_tokens, read_image
from triax.errors import DataError

K25 = Images(patch_limit=16384, board=None)
CORRECTED = Images(reading="corrected")


def gradient(width, height):
    """A picture without two equal pixels in a row or column."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 7 % 256, y * 5 % 256, (x + y) * 3 % 256], axis=-1).astype(np.uint8)


def saved(image, kind="PNG", **options):
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(picture, settings=None):
    """The bytes that the patches hold, back in place."""
    settings = settings or Images()
    _, rows, columns = picture.grid
    side = settings.patch
    cut = picture.patches.reshape(rows, columns, 3, side, side).permute(0, 3, 1, 4, 2)
    whole = cut.reshape(rows * side, columns * side, 3) * settings.std + settings.mean
    return (whole * 255).round().to(torch.uint8).numpy()


@pytest.fixture(scope="module")
def released_size():
    """The resize rule as transformers states it for Kimi-K2.5; its module wants torchvision, its function does not."""
    found = importlib.util.find_spec("transformers")
    path = Path(found.origin).parent / "models/kimi_k25/image_processing_kimi_k25.py"
    body = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef) and n.name == "navit_resize"]
    space = {"math": math}
    exec(compile(ast.Module(body, type_ignores=[]), str(path), "exec"), space)
    return space["navit_resize"]


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(4000, 3000, 143 * 108), (1, 2000, 72), (17, 23, 1), (28, 28, 1), (29, 28, 2), (3584, 3584, 128**2)],
)
def test_pictures_cost_the_released_number_of_tokens(width, height, tokens):
    """U147: 4000x3000 is 143 x 108 tokens; strips and tiny pictures too."""
    assert num_tokens(width, height) == tokens
    fitted = fit(width, height, Images())
    assert fitted.rows * fitted.columns == 4 * tokens


def test_the_largest_picture_is_seen_in_full_and_a_larger_one_is_made_smaller():
    assert fit(3584, 3584, Images())[:2] == (3584, 3584)
    assert fit(3600, 3600, Images())[:2] == (3585, 3585)
    assert fit(20000, 10, Images()).width == 512 * 14


@given(width=st.integers(1, 12000), height=st.integers(1, 12000), limit=st.sampled_from([16384, 65536]))
def test_sizes_equal_those_of_transformers(released_size, width, height, limit):
    settings = Images(patch_limit=limit)
    (new_height, new_width), (padded_height, padded_width) = released_size(height, width, 14, 2, limit, 512)
    assert fit(width, height, settings) == (new_width, new_height, padded_height // 14, padded_width // 14)


def test_a_small_picture_keeps_its_pixels_and_is_padded_with_black():
    source = gradient(30, 17)
    picture = read_image(saved(Image.fromarray(source)))
    assert (picture.grid, picture.width, picture.height, picture.num_tokens) == ((1, 2, 4), 30, 17, 2)
    assert picture.patches.dtype is torch.float32
    assert picture.patches.shape == (8, 3, 14, 14)
    whole = pixels(picture)
    assert np.array_equal(whole[:17, :30], source)
    assert not whole[17:].any()
    assert not whole[:, 30:].any()


def test_patches_lie_row_by_row_with_values_from_minus_one_to_one():
    source = gradient(56, 28)
    patches = read_image(Image.fromarray(source)).patches
    for number in range(8):
        row, column = divmod(number, 4)
        cut = source[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14].astype(np.float64)
        expected = torch.from_numpy((cut / 255 - 0.5) / 0.5).permute(2, 0, 1).float()
        torch.testing.assert_close(patches[number], expected, rtol=0, atol=1e-7)
    assert patches.min() >= -1
    assert patches.max() <= 1


def test_a_large_picture_is_resized_by_pillows_bicubic():
    settings = Images(patch_limit=64)
    image = Image.fromarray(gradient(300, 200))
    fitted = fit(300, 200, settings)
    assert fitted[:2] == (139, 93)
    expected = np.asarray(image.resize((139, 93), Image.Resampling.BICUBIC))
    assert np.array_equal(pixels(read_image(saved(image), settings))[:93, :139], expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_seen_as_it_is_stored_or_corrected_upright(orientation):
    upright = Image.fromarray(gradient(40, 20))
    turn = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,  # stored so that turning it back makes it upright
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(turn[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = read_image(saved(stored, exif=exif), CORRECTED)
    assert (picture.width, picture.height) == (40, 20)
    assert np.array_equal(pixels(picture)[:20, :40], np.asarray(upright))
    lying = read_image(saved(stored, exif=exif))
    assert (lying.width, lying.height) == stored.size
    assert np.array_equal(pixels(lying)[: stored.height, : stored.width], np.asarray(stored))


def modes():
    """One picture in every mode, and the bytes it should be seen as (without transparency)."""
    colour, grey = gradient(32, 30), gradient(32, 30)[..., 0]
    rgb, light = Image.fromarray(colour), Image.fromarray(grey)
    thrice = np.repeat(grey[..., None], 3, axis=-1)
    palette = rgb.quantize(200)
    cmyk = rgb.convert("CMYK")
    yield "RGB", saved(rgb), colour
    yield "L", saved(light), thrice
    yield "1", saved(light.convert("1")), np.asarray(light.convert("1").convert("RGB"))
    yield "P", saved(palette), np.asarray(palette.convert("RGB"))
    yield "CMYK", saved(cmyk, "TIFF"), np.asarray(cmyk.convert("RGB"))
    deep = (grey.astype(np.uint16) << 8) + 99
    yield "I;16", saved(Image.fromarray(deep)), thrice
    yield "I;16 TIFF", saved(Image.fromarray(deep), "TIFF"), thrice
    yield "I", saved(Image.fromarray(deep.astype(np.int32)), "TIFF"), thrice
    yield "LA opaque", saved(light.convert("LA")), thrice
    yield "RGBA opaque", saved(rgb.convert("RGBA")), colour


@pytest.mark.parametrize(("file", "seen"), [m[1:] for m in modes()], ids=[m[0] for m in modes()])
@pytest.mark.parametrize("settings", [CORRECTED, K25.model_copy(update={"reading": "corrected"})], ids=["k3", "k25"])
def test_every_mode_is_seen_as_its_colours(file, seen, settings):
    """U147: palettes, grey, one bit, 16 bits, CMYK and opaque alpha."""
    assert np.array_equal(pixels(read_image(file, settings), settings)[:30, :32], seen)


def test_transparency_shows_a_chessboard():
    source = np.zeros((28, 28, 4), dtype=np.uint8)
    source[:, 14:, 3] = 128
    source[:, 14:, 0] = 200
    whole = pixels(read_image(saved(Image.fromarray(source))))
    for y in range(28):
        for x in range(28):
            board = 180 if (x // 8 + y // 8) % 2 else 255
            alpha = np.float32(source[y, x, 3]) / np.float32(255)
            expected = [int(alpha * np.float32(c) + (1 - alpha) * np.float32(board)) for c in source[y, x, :3]]
            assert whole[y, x].tolist() == expected
    assert whole[0, 0].tolist() == [255] * 3
    assert whole[0, 8].tolist() == [180] * 3


def test_the_chessboard_is_laid_after_resizing_and_under_the_picture_only():
    settings = Images(patch_limit=16)
    source = Image.new("RGBA", (200, 100), (0, 0, 0, 0))
    fitted = fit(200, 100, settings)
    whole = pixels(read_image(saved(source), settings), settings)
    assert whole[0, 7].tolist() == [255] * 3
    assert whole[0, 8].tolist() == [180] * 3  # squares of 8 pixels of the small picture
    assert not whole[fitted.height :].any()
    assert not whole[:, fitted.width :].any()


def test_without_a_board_the_alpha_channel_is_dropped():
    source = np.full((28, 28, 4), 90, dtype=np.uint8)
    source[..., 3] = 0
    assert (pixels(read_image(saved(Image.fromarray(source)), K25)) == 90).all()


@pytest.mark.parametrize("mode", ["P", "L", "LA", "RGBa", "I;16"])
def test_other_kinds_of_transparency_show_the_board_too(mode):
    if mode == "P":
        image = Image.fromarray(np.zeros((28, 28), dtype=np.uint8)).convert("P")
        file = saved(image, transparency=0)
    elif mode == "RGBa":
        file = Image.new("RGBA", (28, 28), (9, 9, 9, 0)).convert("RGBa")
    elif mode == "LA":
        file = saved(Image.new("LA", (28, 28), (0, 0)))
    elif mode == "L":
        file = saved(Image.new("L", (28, 28), 33), transparency=33)
    else:
        image = Image.fromarray(np.full((28, 28), 700, dtype=np.uint16))
        image.info["transparency"] = 700
        file = image
    whole = pixels(read_image(file, CORRECTED))
    assert whole[0, 0].tolist() == [255] * 3
    assert whole[0, 8].tolist() == [180] * 3


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_an_animation_is_seen_by_its_first_frame(kind):
    frames = [Image.new("RGB", (28, 28), colour) for colour in ("red", "lime", "blue")]
    file = saved(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )
    assert np.abs(pixels(read_image(file))[5, 5].astype(int) - [255, 0, 0]).max() < 3
    opened = Image.open(BytesIO(file))
    assert len(list(ImageSequence.Iterator(opened))) == 3
    assert (
        np.abs(pixels(read_image(opened))[5, 5].astype(int) - [255, 0, 0]).max() < 3
    )  # though it stands at its last frame


def test_a_path_is_read_and_named_in_errors(tmp_path):
    path = tmp_path / "here.png"
    path.write_bytes(saved(Image.fromarray(gradient(28, 28))))
    assert read_image(path).num_tokens == read_image(str(path)).num_tokens == 1
    with pytest.raises(DataError, match=r"none\.png: not a picture that can be read"):
        read_image(tmp_path / "none.png")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "image: not a picture that can be read"),
        (b"no picture", "image: not a picture that can be read"),
        (saved(Image.fromarray(gradient(64, 64)))[:-900], "image: not a picture that can be read"),
        (saved(Image.fromarray(gradient(64, 64)), "JPEG")[:-300], "image: not a picture that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "give a whole file of PNG, JPEG"),
        (Image.new("RGB", (0, 0)), "has no pixels; found 0x0"),
        (Image.new("RGB", (5, 0)), "has no pixels; found 5x0"),
        (Image.fromarray(np.ones((28, 28), dtype=np.float32)), "found mode `F`; save it with 8 or 16 bits"),
        (Image.fromarray(np.full((28, 28), 70000, dtype=np.int32)), "found values from 70000 to 70000"),
    ],
    ids=["empty", "text", "cut PNG", "cut JPEG", "program", "0x0", "5x0", "float", "32 bits"],
)
def test_what_is_no_picture_is_refused(source, words):
    with pytest.raises(DataError, match=r"^image: ") as refused:
        read_image(source, CORRECTED)
    assert words in str(refused.value)


def bomb(width, height):
    """A PNG of a few bytes that claims a size."""
    file = bytearray(saved(Image.new("1", (1, 1))))
    file[16:24] = struct.pack(">II", width, height)
    file[29:33] = struct.pack(">I", zlib.crc32(bytes(file[12:29])))
    return bytes(file)


@pytest.mark.parametrize(("width", "height"), [(13000, 13800), (50000, 50000), (2**31 - 1, 2**31 - 1)])
def test_a_file_that_would_unpack_to_too_much_is_refused_before_it_is_unpacked(width, height):
    with pytest.raises(DataError, match="too large to unpack"):
        read_image(bomb(width, height), Images(max_pixels=178_000_000))


def test_a_size_above_the_limit_is_refused_before_a_pixel_is_unpacked():
    with pytest.raises(DataError, match=r"too large to unpack; found 2000x2000, more than 1,000 pixels"):
        read_image(bomb(2000, 2000), Images(max_pixels=1000))  # its pixels are damaged, which is not noticed


def test_a_limit_of_ones_own_holds_for_opened_pictures_too():
    settings = Images(max_pixels=1000)
    for source in (Image.new("RGB", (40, 40)), saved(Image.new("RGB", (40, 40)))):
        with pytest.raises(DataError, match=r"found 40x40, more than 1,000 pixels; make it smaller"):
            read_image(source, settings)


@given(kind=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]), data=st.data())
def test_a_damaged_file_is_a_picture_or_refused(kind, data):
    file = bytearray(saved(Image.fromarray(gradient(40, 30)), kind))
    for place in data.draw(st.lists(st.integers(0, len(file) - 1), max_size=4)):
        file[place] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.one_of(st.just(len(file)), st.integers(0, len(file))))
    try:
        picture = read_image(bytes(file[:end]), Images(patch_limit=64, max_pixels=10**6))
    except DataError:
        return
    assert picture.patches.isfinite().all()
    assert len(picture.patches) == math.prod(picture.grid)


# --- F08: what the released processor makes of odd files


def photograph(width, height, orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(gradient(width, height)), "JPEG", quality=95, exif=exif)


def odd_files():
    """Files in which the released rules differ from what a careful reader would do."""
    rgb, grey = Image.fromarray(gradient(300, 200)), Image.fromarray(gradient(300, 200)[..., 0])
    alpha = rgb.copy()
    alpha.putalpha(grey)
    deep = gradient(300, 200)[..., 0].astype(np.uint16)
    palette, bilevel = rgb.quantize(64), grey.convert("1")
    for orientation in (3, 6, 8):
        yield f"JPEG turned by {orientation}", photograph(300, 200, orientation)
    yield "16-bit grey PNG", saved(Image.fromarray(deep * 3))
    yield "16-bit grey TIFF", saved(Image.fromarray(deep << 8), "TIFF")
    yield "32-bit grey TIFF", saved(Image.fromarray(deep.astype(np.int32)), "TIFF")
    yield "float TIFF", saved(Image.fromarray(deep.astype(np.float32) / 2), "TIFF")
    yield "palette PNG", saved(palette)
    yield "palette PNG with a key", saved(palette, transparency=3)
    yield "palette PNG with alpha", saved(palette, transparency=bytes(range(0, 256, 4)))
    yield "1-bit PNG", saved(bilevel)
    yield "1-bit TIFF", saved(bilevel, "TIFF")
    yield "GIF", saved(palette, "GIF")
    yield "GIF animation", saved(palette, "GIF", save_all=True, append_images=[rgb.rotate(180).quantize(64)])
    yield "GIF with a key", saved(palette, "GIF", transparency=5)
    yield "grey PNG with a key", saved(grey, transparency=21)
    yield "colour PNG with a key", saved(rgb, transparency=(0, 0, 0))
    yield "grey with alpha", saved(grey.convert("LA"))
    yield "RGBA PNG", saved(alpha)
    yield "RGBA WebP", saved(alpha, "WEBP", lossless=True)
    yield "CMYK JPEG", saved(rgb.convert("CMYK"), "JPEG")
    yield "YCbCr TIFF", saved(rgb.convert("YCbCr"), "TIFF")
    yield "2x35146", saved(Image.fromarray(gradient(2, 35146)))
    yield "20000x1", saved(Image.fromarray(gradient(20000, 1)))
    yield "1x1", saved(Image.new("RGB", (1, 1), (9, 8, 7)))


ODD = dict(odd_files())


def by_the_rules(file, limit, board):
    """The released rules step by step, in whole numbers and float64: patches, grid and size told in the prompt."""
    image = Image.open(BytesIO(file))
    width, height = image.size
    if not board:  # K2.5 brings every file to RGB when it is opened
        image = image.convert("RGB")
    patches = max(1, width // 14) * max(1, height // 14)
    scale = min(1.0, math.sqrt(limit / patches), 512 * 14 / width, 512 * 14 / height)
    new = tuple(min(7168, max(1, int(side * scale))) for side in (width, height))
    image = image.resize(new, resample=Image.Resampling.BICUBIC)
    is_opaque = image.mode == "RGB" or ("A" not in image.getbands() and "transparency" not in image.info)
    if is_opaque:
        seen = np.asarray(image.convert("RGB"))
    else:
        mixed = np.asarray(image.convert("RGBA"))
        seen = np.empty((new[1], new[0], 3), dtype=np.uint8)
        for y in range(new[1]):
            for x in range(new[0]):
                behind = np.float32(180 if (x // 8 + y // 8) % 2 else 255)
                share = np.float32(mixed[y, x, 3]) / np.float32(255)
                seen[y, x] = (share * mixed[y, x, :3] + (1 - share) * behind).astype(np.uint8)
    rows, columns = (-(-side // 28) * 2 for side in (new[1], new[0]))
    whole = np.zeros((rows * 14, columns * 14, 3))
    whole[: new[1], : new[0]] = seen
    values = (whole / 255 - 0.5) / 0.5
    cut = [
        values[14 * row : 14 * row + 14, 14 * column : 14 * column + 14].transpose(2, 0, 1)
        for row in range(rows)
        for column in range(columns)
    ]
    return np.stack(cut), (1, rows, columns), (width, height)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("board", [True, False], ids=["k3", "k25"])
@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
def test_f08_odd_files_become_the_pixels_of_the_released_processor(name, board):
    limit = 64 if "x" not in name else 16384
    settings = Images(patch_limit=limit) if board else K25.model_copy(update={"patch_limit": limit})
    patches, grid, size = by_the_rules(ODD[name], limit, board)
    found = read_image(ODD[name], settings)
    assert (found.grid, (found.width, found.height)) == (grid, size)
    torch.testing.assert_close(found.patches, torch.from_numpy(patches).float(), rtol=0, atol=1e-6)


def test_f08_a_thin_picture_is_seen_one_pixel_wide():
    assert fit(2, 35146, Images())[:2] == (1, 7168)
    assert num_tokens(2, 35146) == 256
    assert num_tokens(35146, 1) == 256


@pytest.mark.parametrize("name", ["JPEG turned by 6", "16-bit grey PNG", "palette PNG", "1-bit PNG", "GIF"])
def test_f08_corrected_reading_differs_where_the_released_one_is_at_fault(name):
    released = read_image(ODD[name], Images(patch_limit=64))
    corrected = read_image(ODD[name], Images(patch_limit=64, reading="corrected"))
    assert released.grid != corrected.grid or not torch.equal(released.patches, corrected.patches)


def test_items_are_laid_end_to_end_in_order():
    """U148: distinct grids, so that a wrong order cannot hide."""
    pictures = [read_image(Image.fromarray(gradient(*size))) for size in ((28, 28), (60, 28), (28, 90))]
    patches, grids = lay_out(pictures)
    assert grids == ((1, 2, 2), (1, 2, 6), (1, 8, 2))
    assert torch.equal(patches, torch.cat([picture.patches for picture in pictures]))
    with pytest.raises(DataError, match="found none"):
        lay_out([])
