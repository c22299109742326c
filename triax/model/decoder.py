"""The network: embeds, runs the layers in order, hands the result to the head."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from triax.config.model import BlockResiduals, Model
from triax.errors import ConfigError
from triax.kernels.linear import linear
from triax.model.attention_residual import AttentionMix, Stream
from triax.model.cache import Cache, KdaCache, MlaCache
from triax.model.gated_mla import GatedMLA
from triax.model.gated_mlp import GatedMlp
from triax.model.kda import KDA
from triax.model.latent_moe import LatentMoe
from triax.model.layout import Layout
from triax.model.matrix import Blocks, draw_normal
from triax.model.media import Inserts, MediaEncoder
from triax.model.memory import KdaSlots, Memory, MlaPages
from triax.model.multi_token import MultiToken
from triax.model.norm import RMSNorm, product_dtype
from triax.model.vision import Media


class TrainingOutput(NamedTuple):
    """What the losses read."""

    hidden: Float[Tensor, "T D"]
    """Input of the head for the next token."""
    second: Float[Tensor, "T D"] | None
    """Input of the head for the token after the next, if the model has a multi-token layer."""


class DecoderLayer(nn.Module):
    """One attention and one MLP, each reading the stream through its own mix and norm.

    With Attention Residuals the layer's input is its mix of the sources and is not itself added to the stream;
    without them it is the plain pre-norm residual layer.
    """

    def __init__(self, settings: Model, *, is_mla: bool, is_dense: bool, mixes: bool) -> None:
        super().__init__()
        width, eps, std = settings.width, settings.norm_eps, settings.init_std
        self.attention_mix = AttentionMix(width, eps) if mixes else None
        self.mlp_mix = AttentionMix(width, eps) if mixes else None
        self.attention_norm = RMSNorm(width, eps)
        self.mlp_norm = RMSNorm(width, eps)
        if is_mla:
            assert settings.mla is not None
            self.attention: KDA | GatedMLA = GatedMLA(width, settings.mla, std)
        else:
            assert settings.kda is not None
            self.attention = KDA(width, settings.kda, eps, std)
        if is_dense:
            self.mlp: GatedMlp | LatentMoe = GatedMlp(width, settings.dense_dim, settings.activation, std)
        else:
            assert settings.moe is not None
            self.mlp = LatentMoe(width, settings.moe, settings.activation, eps, std)

    def forward(
        self,
        stream: Stream,
        layout: Layout,
        cache: KdaCache | MlaCache | KdaSlots | MlaPages | None,
        *,
        freeze_before_attention: bool = False,
        freeze_before_mlp: bool = False,
    ) -> None:
        """Read the stream, write to it; `freeze_` says whether the sum so far becomes a source before that write."""
        hidden = stream.normed(self.attention_mix, self.attention_norm)
        if freeze_before_attention:
            stream.freeze()
        stream.write(self.attention(hidden, layout, cache))
        hidden = stream.normed(self.mlp_mix, self.mlp_norm)
        if freeze_before_mlp:
            stream.freeze()
        stream.write(self.mlp(hidden))


class Decoder(nn.Module):
    """A decoder of the Kimi family: K3, Kimi Linear, K2 and K2.5, Moonlight.

    Tokens are a flat stream with a layout; there is no batch axis (`layout.pack` turns a padded batch into a stream).

    Source: K3 report (arXiv 2607.24653) section 2.
    """

    def __init__(self, settings: Model) -> None:
        super().__init__()
        self.settings = settings
        mixes = settings.residuals is not None
        self.embed = nn.Embedding(settings.vocab_size, settings.width)
        self.layers = nn.ModuleList(
            DecoderLayer(settings, is_mla=settings.is_mla(i), is_dense=i < settings.num_dense_layers, mixes=mixes)
            for i in range(settings.num_layers)
        )
        self.output_mix = AttentionMix(settings.width, settings.norm_eps) if mixes else None
        self.output_norm = RMSNorm(settings.width, settings.norm_eps)
        self.head = nn.Linear(settings.width, settings.vocab_size, bias=False)
        self.multi_token = self._multi_token()
        vision = settings.vision
        self.vision = None if vision is None else MediaEncoder(vision, settings.width, settings.init_std)
        for weight in (self.embed.weight, self.head.weight):
            draw_normal(weight, settings.init_std)

    def _multi_token(self) -> MultiToken | None:
        settings = self.settings
        if settings.multi_token is None:
            return None
        last = settings.num_layers - 1
        layer = DecoderLayer(settings, is_mla=settings.is_mla(last), is_dense=settings.moe is None, mixes=False)
        return MultiToken(settings.width, layer, settings.norm_eps, settings.init_std)

    def forward(
        self,
        tokens: Int[Tensor, " T"],
        layout: Layout,
        cache: Cache | Memory | None = None,
        taps: dict[Any, Tensor] | None = None,
        media: Media | Inserts | None = None,
    ) -> Float[Tensor, "T D"]:
        """Return each token's input to the head.

        Args:
            tokens: Sequences laid end to end.
            layout: Where each begins.
            cache: Memory of earlier tokens of these sequences; updated in place. Such a call carries no gradient.
            taps: Filled, if given, with what each layer reads before its first norm (keys 0, 1, …) and with the result
                (key `num_layers`, and again `output`); the vision tower's have names (`vision.embed`, `vision.0`, …).
            media: Pictures and clips whose slots the tokens have, in order; only for models with a tower. Where the
                stream holds parts of items, their vectors from an earlier call of the tower.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            hidden = self.output_norm(self._before_output_norm(tokens, layout, cache, taps, media))
        if taps is not None:
            taps[len(self.layers)] = taps["output"] = hidden
        return hidden

    def forward_training(
        self, tokens: Int[Tensor, " T"], next_tokens: Int[Tensor, " T"], layout: Layout, media: Media | None = None
    ) -> TrainingOutput:
        """Return the head's inputs for the next token and, with a multi-token layer, for the one after.

        Args:
            tokens: Sequences laid end to end.
            next_tokens: The token after each (the targets of the main loss).
            layout: Where each sequence begins.
            media: Pictures and clips whose slots the tokens have, in order. The multi-token layer reads a coming slot
                as that token's own embedding.
        """
        last = self._before_output_norm(tokens, layout, None, None, media)
        second = None if self.multi_token is None else self.multi_token_hidden(last, next_tokens, layout)
        return TrainingOutput(self.output_norm(last), second)

    def _before_output_norm(
        self,
        tokens: Tensor,
        layout: Layout,
        cache: Cache | Memory | None,
        taps: dict[Any, Tensor] | None,
        media: Media | Inserts | None,
    ) -> Float[Tensor, "T D"]:
        if len(tokens) != layout.num_tokens:
            raise ConfigError(
                f"model.decoder: the layout must cover the tokens; found {layout.num_tokens} places for "
                f"{len(tokens)} tokens; pass the lengths of all sequences"
            )
        if cache is not None:
            cache.check(layout)
        residuals, embedded = self.settings.residuals, self._embed(tokens, layout, media, taps)
        # the sources of a mix share one format; a plain stream sums in that of the embedding
        stream = Stream(embedded if residuals is None else embedded.to(product_dtype(embedded)))
        is_full = residuals is not None and residuals.kind == "full"
        block = residuals.block_layers if isinstance(residuals, BlockResiduals) else 0
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, DecoderLayer):
                raise ConfigError(
                    f"model.decoder: layer {i} is a `{type(layer).__name__}`, which does not know the stream; "
                    "put a layer of your own in as `layers[i].attention` or `layers[i].mlp`, or subclass DecoderLayer"
                )
            if taps is not None:
                taps[i] = stream.read(layer.attention_mix)
            layer(
                stream,
                layout,
                None if cache is None else cache.layers[i],
                freeze_before_attention=is_full or (block > 0 and i % block == 0),
                freeze_before_mlp=is_full,
            )
        if cache is not None:
            cache.advance(layout)
        return stream.read(self.output_mix)

    def _embed(
        self, tokens: Tensor, layout: Layout, media: Media | Inserts | None, taps: dict[Any, Tensor] | None
    ) -> Float[Tensor, "T D"]:
        if isinstance(media, Inserts):
            embedded = self.embed(tokens)
            return embedded.index_copy(0, media.places, media.vectors.to(embedded.dtype))
        if self.vision is not None:
            return self.vision.fill(self.embed(tokens), tokens, layout, media, taps)
        if media is not None:
            raise ConfigError(
                f"model.vision: this model reads text only; found {len(media.grids)} pictures or clips; "
                "leave them out or add the table `model.vision`"
            )
        return self.embed(tokens)

    def multi_token_hidden(
        self, hidden: Float[Tensor, "T D"], next_tokens: Int[Tensor, " T"], layout: Layout
    ) -> Float[Tensor, "T D"]:
        """Return the head's input for the token after the next.

        Args:
            hidden: What the last norm reads.
            next_tokens: The token after each.
            layout: Where each sequence begins.

        Raises:
            ConfigError: The model has no multi-token layer.
        """
        if self.multi_token is None:
            raise ConfigError(
                "model.multi_token: this model has no such layer; found none; add the table `model.multi_token`"
            )
        stream = Stream(self.multi_token(hidden, self.embed(next_tokens)))
        self.multi_token.layer(stream, layout, None)
        return self.output_norm(stream.read(None))

    def logits(self, hidden: Float[Tensor, "T D"]) -> Float[Tensor, "T vocab"]:
        """Return the score of every token of the vocabulary."""
        return linear(hidden, self.head.weight)

    def join(self) -> None:
        """Let products that read the same input run as one, once the model stands where it will answer.

        Weights keep names, shapes and values, and can still be written in place; moving or casting the model undoes it.
        """
        for module in self.modules():
            if isinstance(module, KDA | GatedMLA | GatedMlp | LatentMoe):
                module.join()

    def empty_cache(self, num_sequences: int) -> Cache:
        """Return a cache on this model's device and in its format."""
        weight = self.embed.weight
        return Cache.empty(self.settings, num_sequences, weight.device, weight.dtype)

    def mla_layers(self) -> dict[str, GatedMLA]:
        """Return the attention layers that have logits to watch, by name, the multi-token layer's included."""
        return {name: module for name, module in self.named_modules() if isinstance(module, GatedMLA)}

    def largest_logits(self) -> dict[str, Float[Tensor, " H"]]:
        """Return the largest logit of each head of each MLA layer since the last reset."""
        found = {name: layer.largest_logit for name, layer in self.mla_layers().items()}
        return {name: value for name, value in found.items() if value is not None}

    def matrices(self) -> Blocks:
        """Return every logical matrix of the network: full parameter names to repeating row counts."""
        blocks: Blocks = {}
        for prefix, module in self.named_modules():
            own = getattr(module, "matrices", None)
            if prefix and callable(own):
                blocks |= {f"{prefix}.{name}": rows for name, rows in own().items()}
        return blocks

    def mean_mix_weights(self) -> dict[str, Float[Tensor, " J"]]:
        """Return the mean weight of each source at each place whose `record` is on, oldest source first."""
        mixes = {name: m for name, m in self.named_modules() if isinstance(m, AttentionMix)}
        return {name: m.mean_weight for name, m in mixes.items() if m.mean_weight is not None}

    def record_mix_weights(self, on: bool) -> None:
        """Turn the recording of mix weights on or off; off drops what was recorded."""
        for module in self.modules():
            if isinstance(module, AttentionMix):
                module.record = on
                module.mean_weight = None
