"""Videos: which frames are looked at, when they are shown, and files that are no videos."""

import struct
import sys
from fractions import Fraction
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from triax.config.vision import Images, Videos
from triax.data.image import fit, lay_out, read_image
from triax.data.video import chosen_frames, read_video
from triax.errors import DataError

STEP = 5  # grey levels between neighbouring frames, so that a frame can be told by its brightness


@pytest.fixture(scope="module")
def av():
    return pytest.importorskip("av", reason="videos need PyAV: pip install 'triax[video]'")


def recorded(av, num_frames, rate, size=(64, 48), kind="mp4", right=None):
    """A video whose frame `n` is grey of level 10 + 5 n, with a right half of its own if asked for."""
    file = BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=Fraction(rate))
        stream.width, stream.height = size
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        container.start_encoding()
        for number in range(num_frames):
            pixels = np.full((size[1], size[0], 3), 10 + STEP * number, dtype=np.uint8)
            if right is not None:
                pixels[:, size[0] // 2 :] = right
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def numbers(clip):
    """Which frames a clip shows, told by their brightness."""
    frames = clip.patches.reshape(clip.grid[0], -1, 3, 14, 14)
    grey = (frames[:, 0] * 0.5 + 0.5).mean((1, 2, 3)) * 255
    return [round(float(level - 10) / STEP) for level in grey]


def test_a_video_becomes_clips_of_four_frames_at_two_a_second(av):
    clips = read_video(recorded(av, 40, 10))  # four seconds: eight frames, 39 / 7 apart
    assert [clip.grid for clip in clips] == [(4, 4, 6), (4, 4, 6)]
    assert [number for clip in clips for number in numbers(clip)] == [0, 6, 11, 17, 22, 28, 33, 39]
    assert [clip.start_s for clip in clips] == [0, 2.2]
    assert [clip.num_tokens for clip in clips] == [6, 6]


def test_the_last_clip_may_be_shorter(av):
    clips = read_video(recorded(av, 30, 10))
    assert [clip.grid[0] for clip in clips] == [4, 2]
    assert [clip.num_tokens for clip in clips] == [6, 6]


def test_a_slow_video_is_seen_frame_by_frame(av):
    clips = read_video(recorded(av, 5, 1))
    assert [number for clip in clips for number in numbers(clip)] == [0, 1, 2, 3, 4]
    assert clips[1].start_s == 4


def test_one_frame_is_a_picture(av):
    """U150: a video of one frame has the patches of that frame as a picture."""
    (clip,) = read_video(recorded(av, 1, 25, size=(60, 30)))
    assert clip.grid == (1, 4, 6)
    picture = read_image(Image.new("RGB", (60, 30), (10, 10, 10)))
    assert clip.grid == picture.grid
    assert clip.num_tokens == picture.num_tokens
    torch.testing.assert_close(clip.patches, picture.patches, rtol=0, atol=0.05)
    patches, grids = lay_out([clip, picture])
    assert grids == (clip.grid, picture.grid)
    assert len(patches) == 48


def test_a_video_from_a_phone_held_upright_is_seen_upright(av):
    """Its frames are stored lying on their side, with the turn written in the track's header."""
    file = bytearray(recorded(av, 4, 2, size=(64, 48), right=200))
    lying = read_video(bytes(file))[0]
    matrix = file.index(b"tkhd") + 44
    file[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)
    upright = read_video(bytes(file))[0]
    assert (lying.grid, upright.grid) == ((4, 4, 6), (4, 6, 4))
    frame = upright.patches[:24].reshape(6, 4, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, 84, 56)[0] * 0.5 + 0.5
    assert (frame[2:30, :44] < 0.2).all()  # what was left is above
    assert (frame[34:62, :44] > 0.6).all()  # what was right is below: turned clockwise


def test_frames_are_made_smaller_than_pictures(av):
    """4096 patches a frame, whatever a picture may have."""
    clip = read_video(recorded(av, 2, 2, size=(1280, 960)))[0]
    fitted = fit(1280, 960, Images(patch_limit=4096))
    assert clip.grid == (2, fitted.rows, fitted.columns)
    assert fitted.rows * fitted.columns < 1280 * 960 / 14**2 * 0.8


def test_frames_share_a_limit_for_the_whole_video(av):
    settings = Videos(patch_limit=48)
    clip = read_video(recorded(av, 20, 10, size=(128, 96)), settings)[0]  # four frames: 12 patches each
    assert clip.grid[1:] == fit(128, 96, Images(patch_limit=12))[2:]


@given(
    num_frames=st.integers(1, 5000),
    rate=st.one_of(st.floats(0.1, 240), st.sampled_from([24000 / 1001, 25.0, 30.0, 2.0])),
)
def test_chosen_frames_are_in_order_and_span_the_video(num_frames, rate):
    chosen = chosen_frames(num_frames, rate, Videos(max_frames=10**6))
    assert chosen[0] == 0
    assert len(chosen) == max(1, round(num_frames * min(2.0, rate) / rate))
    assert len(chosen) == 1 or chosen[-1] == num_frames - 1
    assert chosen == sorted(set(chosen))
    if rate <= 2:
        assert chosen == list(range(num_frames))


def test_a_video_that_is_too_long_is_refused(av):
    with pytest.raises(DataError, match=r"video: too long; found 8 frames to look at, more than max_frames `7`"):
        read_video(recorded(av, 40, 10), Videos(max_frames=7))


def test_a_path_is_read_and_named_in_errors(av, tmp_path):
    path = tmp_path / "film.mp4"
    path.write_bytes(recorded(av, 4, 2))
    assert len(read_video(path)) == 1
    with pytest.raises(DataError, match=r"none\.mp4: not a video that can be read"):
        read_video(tmp_path / "none.mp4")


def sound(av):
    """A file with sound and no picture."""
    file = BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def frameless(av):
    """A file that announces a video and holds no frame of it."""
    return recorded(av, 0, 10, kind="avi")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda av: b"", "not a video that can be read"),
        (lambda av: b"no video at all" * 50, "not a video that can be read"),
        (lambda av: recorded(av, 20, 10)[:600], "not a video that can be read"),
        (sound, "holds no video; found 1 other streams"),
        (frameless, "found 0 frames"),
    ],
    ids=["empty", "text", "cut", "sound", "no frames"],
)
def test_what_is_no_video_is_refused(av, make, words):
    with pytest.raises(DataError, match=r"^video: ") as refused:
        read_video(make(av))
    assert words in str(refused.value)


def test_a_video_whose_labels_are_no_text_is_read_or_refused(av, whole):
    label = whole.rindex(b"Lavf")
    odd = whole[:label] + b"\xcc\xff" + whole[label + 2 :]
    if int(av.__version__.partition(".")[0]) < 19:
        with pytest.raises(DataError, match="not a video that can be read"):
            read_video(odd)
    else:
        pairs = zip(read_video(odd), read_video(whole), strict=True)
        assert all(torch.equal(one.patches, other.patches) for one, other in pairs)


@given(data=st.data())
def test_a_damaged_video_is_a_video_or_refused(av, whole, data):
    file = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(file) - 1), max_size=6)):
        file[place] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.one_of(st.just(len(file)), st.integers(0, len(file))))
    try:
        clips = read_video(bytes(file[:end]), Videos(frame_patch_limit=64, max_frames=50))
    except DataError:
        return
    assert clips
    assert all(clip.patches.isfinite().all() for clip in clips)


@pytest.fixture(scope="module")
def whole(av):
    return recorded(av, 12, 6)


def test_without_pyav_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"pip install -e '.*\[video\]'"):
        read_video(b"")
