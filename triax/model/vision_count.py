"""The tensors of the vision tower and its projector, from the settings alone."""

from collections.abc import Iterator

from triax.config.vision import Vision


def vision_weights(settings: Vision, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List name (as in the decoder's state dict) and shape of every tensor, in forward order.

    Args:
        settings: The tower.
        width: Channels of the decoder that reads its tokens.
    """
    own, inner = settings.width, settings.num_heads * settings.head_dim
    wide = settings.merge**2 * own
    side = settings.patch
    yield from _with_bias("vision.tower.patch", (own, 3, side, side), settings.bias)
    yield "vision.tower.position", (settings.table_rows, settings.table_columns, own)
    for layer in range(settings.num_layers):
        at = f"vision.tower.layers.{layer}"
        yield from _with_bias(f"{at}.attention_norm", (own,), settings.norm == "layer")
        yield from _with_bias(f"{at}.attention.query_key_value", (3 * inner, own), settings.bias)
        yield from _with_bias(f"{at}.attention.output", (own, inner), settings.bias)
        yield from _with_bias(f"{at}.mlp_norm", (own,), settings.norm == "layer")
        yield from _with_bias(f"{at}.mlp.up", (settings.mlp_dim, own), settings.bias)
        yield from _with_bias(f"{at}.mlp.down", (own, settings.mlp_dim), settings.bias)
    yield from _with_bias("vision.tower.output_norm", (own,), settings.norm == "layer")
    before = settings.projector == "norm_before"
    if before:
        yield from _with_bias("vision.projector.norm", (own,), True)
    yield from _with_bias("vision.projector.inner", (wide, wide), settings.bias)
    yield from _with_bias("vision.projector.output", (width, wide), settings.bias)
    if not before:
        yield "vision.projector.norm.weight", (width,)


def _with_bias(name: str, shape: tuple[int, ...], has_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]
