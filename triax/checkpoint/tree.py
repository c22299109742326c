"""A nested state as JSON plus named tensors: nothing in a checkpoint can run code when it is read."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

TENSOR, TUPLE, PAIRS = "$tensor", "$tuple", "$pairs"


def split(tree: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return the tree with references in place of tensors, and the tensors by their path."""
    tensors: dict[str, Tensor] = {}
    return _split(tree, name, tensors), tensors


def join(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put the tensors back into their places: the inverse of `split`."""
    if isinstance(skeleton, list):
        return [join(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if TENSOR in skeleton:
        return tensors[skeleton[TENSOR]]
    if TUPLE in skeleton:
        return tuple(join(item, tensors) for item in skeleton[TUPLE])
    if PAIRS in skeleton:
        return {join(key, tensors): join(value, tensors) for key, value in skeleton[PAIRS]}
    return {key: join(value, tensors) for key, value in skeleton.items()}


def _split(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        if name in tensors:
            raise TypeError(f"state holds two tensors at `{name}`; keys that read alike cannot be told apart")
        tensors[name] = tree
        return {TENSOR: name}
    if isinstance(tree, Mapping):
        items = {key: _split(value, f"{name}/{key}" if name else str(key), tensors) for key, value in tree.items()}
        plain = all(isinstance(key, str) and not key.startswith("$") for key in items)
        return items if plain else {PAIRS: [[_split(key, name, tensors), value] for key, value in items.items()]}
    if isinstance(tree, list | tuple):
        parts = [_split(item, f"{name}/{i}" if name else str(i), tensors) for i, item in enumerate(tree)]
        return parts if isinstance(tree, list) else {TUPLE: parts}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"state `{name}` holds a {type(tree).__name__}; a checkpoint takes tensors, numbers and text")
