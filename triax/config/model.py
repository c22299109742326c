"""The shape of a network: everything that decides which tensors exist and what they compute."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from triax.config.settings import Settings
from triax.config.vision import Vision


class Situ(Settings):
    """SiTU-GLU: `gate_cap tanh(g / gate_cap) sigmoid(g)` times `up_cap tanh(u / up_cap)`."""

    kind: Literal["situ"] = "situ"
    gate_cap: float = Field(4.0, gt=0)
    """Largest size of the gate branch (beta 1)."""
    up_cap: float | None = Field(25.0, gt=0)
    """Largest size of the up branch (beta 2); none leaves that branch as it is."""


class Swiglu(Settings):
    """SwiGLU: `silu(g) u`."""

    kind: Literal["swiglu"] = "swiglu"


Activation = Annotated[Situ | Swiglu, Field(discriminator="kind")]


class BoundedGate(Settings):
    """Decay gate of K3: `lowest_log_decay sigmoid(exp(rate) z)`."""

    kind: Literal["bounded"] = "bounded"
    lowest_log_decay: float = Field(-5.0, ge=-5.0, lt=0)
    """Log of the fastest forgetting per token; -5 is the limit of the 16-token tiles."""


class SoftplusGate(Settings):
    """Decay gate of Kimi Linear: `-exp(rate) softplus(z)`, without a lower bound."""

    kind: Literal["softplus"] = "softplus"


class Kda(Settings):
    """Kimi Delta Attention layers."""

    num_heads: PositiveInt
    """Heads, each with its own [head_dim, head_dim] state."""
    head_dim: PositiveInt
    """Channels of one head, for keys and values alike."""
    conv_kernel: int = Field(4, ge=1)
    """Tokens that a short convolution sees, the current one included."""
    decay: Annotated[BoundedGate | SoftplusGate, Field(discriminator="kind")] = BoundedGate()
    """How each key channel forgets."""
    output_gate: Literal["full", "low_rank"] = "full"
    """One full matrix (K3), or a pair of rank head_dim (Kimi Linear)."""


class Yarn(Settings):
    """YaRN stretching of rotary positions."""

    factor: float = Field(ge=1)
    """Longest context over the original one."""
    original_len: PositiveInt = 4096
    """Context before stretching, in tokens."""
    beta_fast: float = Field(32.0, gt=0)
    """Rotations over the original context above which a frequency is kept."""
    beta_slow: float = Field(1.0, gt=0)
    """Rotations over the original context below which a frequency is divided by the factor."""
    mscale: float = Field(1.0, ge=0)
    """Numerator scale of the cosine table."""
    mscale_all_dim: float = Field(1.0, ge=0)
    """Scale of the logits: they are multiplied by (0.1 mscale_all_dim ln(factor) + 1) squared."""


class Rope(Settings):
    """Rotary positions on the head-shared key part (K2, Moonlight); absent in NoPE models."""

    theta: float = Field(50000.0, gt=1)
    """Base of the frequencies."""
    yarn: Yarn | None = None
    """Stretching for long context."""


class Mla(Settings):
    """Multi-head latent attention layers."""

    num_heads: PositiveInt
    """Query heads."""
    q_latent_dim: int = Field(0, ge=0)
    """Width of the compressed query; 0 projects queries straight from the stream."""
    kv_latent_dim: PositiveInt
    """Width of the cached latent from which keys and values are rebuilt."""
    nope_dim: PositiveInt
    """Channels of a head's own key."""
    rope_dim: int = Field(ge=0)
    """Channels of the key part that all heads share; rotated only where `rope` is set."""
    value_dim: PositiveInt
    """Channels of a head's value."""
    output_gate: bool = False
    """Multiply the heads' outputs by a sigmoid gate read from the layer's input (K3)."""
    rope: Rope | None = None
    """Rotary positions; none is NoPE."""
    latent_norm_eps: float = Field(1e-6, gt=0)
    """Epsilon of the two latent norms; the shipped code uses 1e-6 whatever the model's own."""

    @model_validator(mode="after")
    def _channels_turn_in_pairs(self) -> "Mla":
        if self.rope is not None and (self.rope_dim == 0 or self.rope_dim % 2):
            raise ValueError(
                f"rope turns pairs of channels, but rope_dim is `{self.rope_dim}`; "
                "make rope_dim even and more than 0, or leave rope out"
            )
        return self


class Moe(Settings):
    """Routed and shared experts."""

    num_experts: PositiveInt
    """Routed experts."""
    top_k: PositiveInt
    """Routed experts that a token uses."""
    num_shared_experts: int = Field(0, ge=0)
    """Experts that every token uses, stored as one wider MLP on the full stream."""
    expert_dim: PositiveInt
    """Inner width of one expert."""
    latent_dim: int = Field(0, ge=0)
    """Width of the space in which routed experts work; 0 lets them work on the stream itself."""
    latent_norm: bool = True
    """Normalise the experts' weighted sum before it leaves the latent space (only with latent_dim > 0)."""
    renormalize: bool = True
    """Let the chosen experts' shares sum to one."""
    share_scale: float = Field(1.0, gt=0)
    """Factor on the shares (routed_scaling_factor)."""
    num_groups: PositiveInt = 1
    """Groups of experts for group-limited choice."""
    top_groups: PositiveInt = 1
    """Groups that stay eligible for a token."""

    @model_validator(mode="after")
    def _choice_is_possible(self) -> "Moe":
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ValueError(
                f"num_groups `{self.num_groups}` must divide num_experts `{self.num_experts}` "
                f"and be at least top_groups `{self.top_groups}`"
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ValueError(
                f"top_k `{self.top_k}` is more than the eligible experts of num_experts `{self.num_experts}`; "
                "lower top_k"
            )
        return self


class BlockResiduals(Settings):
    """Block Attention Residuals: one source per block of layers, plus the running sum."""

    kind: Literal["block"] = "block"
    block_layers: PositiveInt
    """Decoder layers (attention and MLP together) in a block; 12 in K3."""


class FullResiduals(Settings):
    """Full Attention Residuals: every sublayer's output is a source of its own."""

    kind: Literal["full"] = "full"


class MultiToken(Settings):
    """One extra layer that predicts the token after the next (multi-token prediction, depth 1)."""

    loss_weight: float = Field(0.1, ge=0)
    """Weight of its loss beside the main one."""


class Model(Settings):
    """One decoder of the Kimi family."""

    vocab_size: PositiveInt
    """Rows of the embedding and of the head."""
    width: PositiveInt
    """Channels of the residual stream."""
    num_layers: PositiveInt
    """Decoder layers, each one attention and one MLP."""
    mla_layers: tuple[int, ...] = ()
    """Layers, counted from 0, whose attention is MLA; all others are KDA."""
    num_dense_layers: int = Field(0, ge=0)
    """First layers whose MLP is dense instead of routed."""
    dense_dim: int = Field(0, ge=0)
    """Inner width of the dense MLPs."""
    activation: Activation = Situ()
    """Activation of every MLP and expert."""
    kda: Kda | None = None
    """Shape of the KDA layers, if there are any."""
    mla: Mla | None = None
    """Shape of the MLA layers, if there are any."""
    moe: Moe | None = None
    """Shape of the routed layers, if there are any."""
    residuals: Annotated[BlockResiduals | FullResiduals, Field(discriminator="kind")] | None = None
    """Attention Residuals; none is the plain residual sum."""
    multi_token: MultiToken | None = None
    """The extra prediction layer."""
    vision: Vision | None = None
    """The tower that turns pictures and clips into tokens; none is a text model."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon of the norms of the stream and of KDA's heads."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of fresh matrices."""
    context_len: PositiveInt = 1048576
    """Longest sequence the model is meant for, in tokens."""

    @model_validator(mode="after")
    def _parts_are_there(self) -> "Model":
        outside = [i for i in self.mla_layers if not 0 <= i < self.num_layers]
        if outside or len(set(self.mla_layers)) != len(self.mla_layers):
            raise ValueError(
                f"mla_layers `{list(self.mla_layers)}` must name different layers from 0 to {self.num_layers - 1}"
            )
        needs = {
            "mla": bool(self.mla_layers),
            "kda": len(self.mla_layers) < self.num_layers,
            "moe": self.num_dense_layers < self.num_layers,
        }
        for part, needed in needs.items():
            if needed and getattr(self, part) is None:
                raise ValueError(f"a layer needs the table `{part}`; none was found; add it")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers `{self.num_dense_layers}` is more than num_layers `{self.num_layers}`; lower it"
            )
        if self.num_dense_layers > 0 and self.dense_dim == 0:
            raise ValueError(f"num_dense_layers is `{self.num_dense_layers}` but dense_dim is 0; give the dense width")
        if self.vision is not None and self.vision.slot_token >= self.vocab_size:
            raise ValueError(
                f"vision.slot_token is `{self.vision.slot_token}` but vocab_size is `{self.vocab_size}`; "
                "name a token of the vocabulary"
            )
        return self

    def is_mla(self, layer: int) -> bool:
        """Whether the attention of `layer` (from 0) is MLA."""
        return layer in self.mla_layers
