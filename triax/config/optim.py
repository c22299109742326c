"""How weights move: the optimiser, its schedule and the balance of experts."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from triax.config.settings import Settings

Beta = Annotated[float, Field(ge=0, lt=1)]


class QkClip(Settings):
    """Weight clipping of K2: shrink a head's query and key weights when its largest logit passes the threshold."""

    threshold: float = Field(100.0, gt=0)
    """Largest attention logit that is left alone (tau)."""
    alpha: float = Field(0.5, ge=0, le=1)
    """Share of the shrinking that the query takes."""


class AdamW(Settings):
    """AdamW for every parameter."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices; norms, biases and gates are not decayed."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_norm: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""


class MuonClip(Settings):
    """Muon for matrices, AdamW for the rest, one learning rate, QK-Clip after each step."""

    kind: Literal["muonclip"] = "muonclip"
    lr: float = Field(2e-4, gt=0)
    """Peak learning rate of all parameters."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay, taken with the unscaled learning rate."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of Muon's momentum."""
    nesterov: bool = True
    """Orthogonalise `momentum * buffer + gradient` instead of the buffer."""
    update_rms: float = Field(0.2, gt=0)
    """Root mean square that an orthogonal update is scaled to."""
    newton_schulz_steps: int = Field(5, ge=1)
    """Iterations of the orthogonalisation."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's moments for the parameters that are not matrices."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of AdamW's second moment."""
    clip_norm: float = Field(1.0, ge=0)
    """Largest global gradient norm, applied before the momentum; 0 does not clip."""
    qk_clip: QkClip | None = QkClip()
    """Weight clipping of attention logits."""


Optim = Annotated[MuonClip | AdamW, Field(discriminator="kind")]


class Segment(Settings):
    """One stretch of the schedule, ending at a token count."""

    shape: Literal["constant", "linear", "cosine", "1-sqrt"]
    """How the rate moves from the last segment's end to this one's."""
    until: float = Field(gt=0, le=1)
    """Where it ends, as a share of the planned tokens."""
    to: float = Field(ge=0)
    """Rate at its end, as a share of the peak."""


class Schedule(Settings):
    """Learning rate as a function of tokens seen: segments that follow one another from rate 0."""

    segments: tuple[Segment, ...] = (
        Segment(shape="linear", until=0.01, to=1.0),
        Segment(shape="cosine", until=1.0, to=0.1),
    )
    """K3's form: 1 % linear warm-up, then cosine."""

    @model_validator(mode="after")
    def _segments_follow(self) -> "Schedule":
        ends = [segment.until for segment in self.segments]
        if not ends or ends != sorted(set(ends)) or ends[-1] != 1.0:
            raise ValueError(f"segments must end at rising shares of the tokens, the last at 1.0; found `{ends}`")
        if not any(segment.to for segment in self.segments):
            raise ValueError("segments never leave rate 0, from which the first starts; give one a `to` above 0")
        return self


class Balance(Settings):
    """How routed experts are kept evenly loaded."""

    rule: Literal["quantile", "sign", "none"] = "quantile"
    """Quantile balancing (K3), the sign step (K2), or a bias that never moves."""
    num_bins: int = Field(1000, ge=2)
    """Bins of the margin histogram (quantile)."""
    step: float = Field(1e-3, gt=0)
    """Step of the sign rule."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Share of the old bias that a new quantile keeps; 0 is the published rule."""
