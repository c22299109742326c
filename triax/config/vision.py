"""The shape of the vision tower, and how pictures and videos become patches."""

from typing import Literal

from pydantic import Field, PositiveInt

from triax.config.settings import Settings


class Vision(Settings):
    """A tower over patches of pictures and short clips, and the projector into the decoder's width.

    The defaults are K3's tower (MoonViT-V2); K2.5's differs in norms, biases, table resizing and projector.
    """

    width: PositiveInt = Field(1024, multiple_of=2)
    """Channels of the tower's stream."""
    num_layers: PositiveInt = 27
    """Layers, each one attention and one MLP."""
    num_heads: PositiveInt = 12
    """Attention heads; together they may be wider than the stream."""
    head_dim: PositiveInt = Field(128, multiple_of=4)
    """Channels of one head; neighbouring pairs turn by column and row in alternation."""
    mlp_dim: PositiveInt = 4096
    """Inner width of the MLPs."""
    norm: Literal["rms", "layer"] = "rms"
    """Root-mean-square norms (K3), or layer norms with a shift (K2.5)."""
    norm_eps: float = Field(1.1920929e-7, gt=0)
    """Epsilon of the tower's norms."""
    bias: bool = False
    """Give every product of tower and projector a bias (K2.5)."""
    patch: PositiveInt = 14
    """Side of a square patch, in pixels."""
    merge: PositiveInt = 2
    """Side of the square of patches that becomes one token."""
    table_rows: PositiveInt = 64
    """Rows of the learnt position table; other grids resize it."""
    table_columns: PositiveInt = 64
    """Columns of the learnt position table."""
    resize: Literal["bilinear", "bicubic"] = "bilinear"
    """How the table is resized: bilinear (K3) or bicubic (K2.5)."""
    max_frames: PositiveInt = 4
    """Frames that one clip may have."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies and of the clock of frames."""
    projector: Literal["norm_after", "norm_before"] = "norm_after"
    """RMSNorm of the finished tokens (K3), or LayerNorm of the patches before the products (K2.5)."""
    projector_eps: float = Field(1e-5, gt=0)
    """Epsilon of the projector's norm."""
    slot_token: int = Field(163605, ge=0)
    """Token whose embeddings the features replace (`<|media_pad|>`)."""

    def num_tokens(self, rows: int, columns: int) -> int:
        """Return the tokens of an item whose frames have this many patches; frames are pooled, so they cost nothing."""
        return rows // self.merge * (columns // self.merge)


class Chessboard(Settings):
    """What shows through transparent pixels: light and grey squares, a light one at the top left."""

    square: PositiveInt = 8
    """Side of a square, in pixels of the resized picture."""
    light: int = Field(255, ge=0, le=255)
    """Value of the light squares."""
    grey: int = Field(180, ge=0, le=255)
    """Value of the grey squares."""


class Images(Settings):
    """How a picture becomes patches. The defaults are K3's.

    K2.5 has 16384 patches a picture and no board: it drops the alpha channel.
    """

    patch: PositiveInt = 14
    """Side of a square patch, in pixels."""
    merge: PositiveInt = 2
    """Side of the square of patches that becomes one token; pictures are padded to whole ones."""
    patch_limit: PositiveInt = 65536
    """Patches of a whole picture above which it is made smaller."""
    side_limit: PositiveInt = 512
    """Patches along one side above which a picture is made smaller."""
    mean: float = Field(0.5, ge=0, le=1)
    """Subtracted from values in [0, 1]."""
    std: float = Field(0.5, gt=0)
    """Divides what is left."""
    board: Chessboard | None = Chessboard()
    """What shows through transparent pixels; none drops the alpha channel."""
    reading: Literal["released", "corrected"] = "released"
    """How files become pixels: as the released processor does, which ignores that a photograph is turned, resizes
    palettes and one bit by the nearest pixel and leaves 16 bits to Pillow; or corrected: upright, smooth, 8 bits."""
    max_pixels: int = Field(178_956_970, gt=0, le=178_956_970)
    """Pixels above which a file is refused before it is unpacked."""


class Videos(Settings):
    """How a video becomes clips. The defaults are K2.5's.

    K3's own file is said to ask for 8 frames a second, 16384 patches a frame and 655360 a video; the public K3 servers
    take pictures only.
    """

    frames_per_s: float = Field(2.0, gt=0)
    """Frames taken from each second, or all of them if the video has fewer."""
    clip_frames: PositiveInt = 4
    """Frames of one clip, which becomes one block of tokens."""
    frame_patch_limit: PositiveInt = 4096
    """Patches of one frame above which it is made smaller."""
    patch_limit: PositiveInt | None = None
    """Patches of all frames together, shared evenly among them; none sets no such limit."""
    max_frames: PositiveInt = 1024
    """Frames above which a video is refused."""
    images: Images = Images()
    """Patches, sides, padding and values of each frame."""
