"""Which parameter moves by which rule: every layer states its own matrices, all else is AdamW's."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from triax.errors import ConfigError

NO_MATRICES = ("beta.weight", "query_conv", "key_conv", "value_conv")  # of several rows, and AdamW's all the same
LEFT_OUT = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
VOCABULARY = ("embed.weight", "head.weight")  # tables over the vocabulary: AdamW's, but decayed like matrices


@dataclass(frozen=True)
class Role:
    """How one parameter moves."""

    rule: Literal["muon", "adamw"]
    """Orthogonalised matrices, or AdamW element by element."""
    pattern: tuple[int, ...]
    """Rows of its logical matrices, repeated down the parameter seen as [rows, last dimension]; empty for AdamW."""
    num_matrices: int
    """Logical matrices in it; 0 for AdamW."""
    is_decayed: bool
    """Whether weight decay pulls it to zero: matrices, the embedding and the head are, all else is not."""


def roles(model: nn.Module, *, muon: bool = True) -> dict[str, Role]:
    """Return the role of each trainable parameter by its name, as the layers state it.

    A module states matrices with a method `matrices()`: name of a parameter, relative to the module, to the row counts
    of its logical matrices, which repeat down the rows. `{"query.weight": (128,)}` is one matrix per 128-row head.
    Norms, biases, gates, convolutions and mix queries are stated by nobody: AdamW moves them and nothing decays them.

    Args:
        model: Modules that state matrices or hold plain parameters.
        muon: Let Muon move the matrices; otherwise AdamW does, with the same decay.

    Raises:
        ConfigError: A stated name does not exist, is stated twice differently, or its pattern does not fit its rows.
    """
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    stated = _stated(model)
    found = {}
    for name, weight in parameters.items():
        pattern = stated.get(id(weight), ())
        rule = "muon" if pattern and muon else "adamw"
        is_decayed = bool(pattern) or ".".join(name.split(".")[-2:]) in VOCABULARY
        if rule == "adamw":
            found[name] = Role(rule, (), 0, is_decayed)
            continue
        num_matrices = weight.numel() // weight.shape[-1] // sum(pattern) * len(pattern)
        found[name] = Role(rule, pattern, num_matrices, is_decayed)
    return found


def unstated(model: nn.Module) -> list[str]:
    """Return the trainable matrices that no layer states, so that AdamW moves them without decay.

    Those that are left out on purpose are not among them: tables over a vocabulary, convolutions, `beta`, whose rows
    are single heads, and all that a layer holds whose `matrices()` is empty.
    """
    stated = _stated(model)
    silent = [
        f"{where}."
        for where, module in model.named_modules()
        if isinstance(module, LEFT_OUT) or (callable(found := getattr(module, "matrices", None)) and not found())
    ]
    return [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.ndim > 1 and min(weight.shape[-2:]) > 1
        if id(weight) not in stated and not name.endswith((*VOCABULARY, *NO_MATRICES))
        if not name.startswith(tuple(silent))
    ]


def dump(found: dict[str, Role]) -> list[dict[str, Any]]:
    """Return the roles as plain data, one row a parameter, for logs and for reading."""
    return [{"name": name} | asdict(role) for name, role in found.items()]


def _stated(model: nn.Module) -> dict[int, tuple[int, ...]]:
    patterns: dict[int, tuple[int, ...]] = {}
    for where, name, pattern in _statements(model):
        owner = model.get_submodule(where)
        try:
            weight = owner.get_parameter(name)
        except AttributeError:
            raise ConfigError(
                f"optim: layer `{where}` ({type(owner).__name__}) states the matrix `{name}`, "
                "which is not among its parameters; correct its matrices()"
            ) from None
        rows = weight.numel() // weight.shape[-1] if weight.ndim > 1 and weight.numel() else 0
        if not pattern or min(pattern) < 1 or not rows or rows % sum(pattern):
            raise ConfigError(
                f"optim: layer `{where}` ({type(owner).__name__}) cuts `{name}` into matrices of `{pattern}` rows, "
                f"which do not fill it; found shape `{tuple(weight.shape)}`; correct its matrices()"
            )
        if patterns.setdefault(id(weight), pattern) != pattern:
            raise ConfigError(
                f"optim: `{where}.{name}` is cut into `{pattern}` rows by one layer and "
                f"`{patterns[id(weight)]}` by another; state it in one place"
            )
    return patterns


def _statements(model: nn.Module) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for where, module in reversed(list(model.named_modules())):  # inner first: errors name the layer itself
        matrices = getattr(module, "matrices", None)
        if callable(matrices):
            for name, pattern in matrices().items():
                yield where, name, tuple(pattern)
