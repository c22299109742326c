"""From names, TOML files and `key.path=value` words to validated settings that know where each value came from."""

import datetime
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from triax.config.explain import explain
from triax.config.model import Model
from triax.config.schema import Tree, complete
from triax.config.settings import Settings
from triax.config.train import Recipe
from triax.errors import ConfigError

S = TypeVar("S", bound=Settings)
COMMAND_LINE = "command line"


class ModelOnly(Settings):
    """The part of a recipe that decides the network; what `triax model show` reads."""

    model: Model
    """The network."""


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """Validated settings and where their values were written."""

    settings: S
    """The whole, defaults filled in."""
    origins: Mapping[str, str]
    """For each value that was written somewhere: its path (`optim.lr`) and the file or `command line`."""
    path: Path
    """The recipe's file."""


def recipe_folders() -> list[Path]:
    """Return where shipped recipes lie: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return [folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir()]


def recipe_names() -> list[str]:
    """Return the names of all shipped recipes."""
    return sorted(
        {
            path.relative_to(folder).with_suffix("").as_posix()
            for folder in recipe_folders()
            for path in folder.glob("**/*.toml")
        }
    )


def find_recipe(name_or_path: str | Path, near: Path | None = None) -> Path:
    """Return the file of a recipe, given its path (with suffix) or a shipped name such as `tiny`.

    Args:
        name_or_path: What the user wrote.
        near: Folder from which a relative path is read; the current one if not given.

    Raises:
        ConfigError: There is no such file or name.
    """
    text = str(name_or_path)
    path = (near or Path()) / text
    if path.is_file():
        return path
    if path.suffix not in (".toml", ".json") or near is not None:
        for folder in recipe_folders():
            shipped = folder / (text if text.endswith(".toml") else f"{text}.toml")
            if shipped.is_file():
                return shipped
    if path.is_dir() and (path / "recipe.json").is_file():
        return path / "recipe.json"  # a run folder
    nearest = difflib.get_close_matches(text, recipe_names(), n=1)
    hint = f"nearest is `{nearest[0]}`" if nearest else f"shipped are {', '.join(f'`{n}`' for n in recipe_names())}"
    raise ConfigError(f"recipe `{text}`: no such file or shipped recipe; {hint}")


def merge(below: Tree, above: Tree) -> Tree:
    """Lay one tree over another; a table that changes its `kind` replaces the table below."""
    if above.get("kind", below.get("kind")) != below.get("kind"):
        return above
    return below | {
        name: merge(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }


def read(path: Path, above: tuple[Path, ...] = ()) -> list[tuple[str, Tree]]:
    """Read a recipe and its parents, the farthest parent first.

    Raises:
        ConfigError: A file is missing, not TOML, or extends itself.
    """
    here = path.resolve()
    if here in above:
        chain = " extends ".join(str(short(p)) for p in (*above, here))
        raise ConfigError(f"{short(path)}: recipes extend each other in a circle; found `{chain}`; break the chain")
    tree = _parse(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return [(str(short(path)), tree)]
    if not isinstance(parent, str):
        raise ConfigError(f"{short(path)}: extends must be one name or path; found `{parent}`")
    try:
        parent_path = find_recipe(parent, near=path.parent)
    except ConfigError as problem:
        raise ConfigError(f"{short(path)}: extends {problem}") from None
    return [*read(parent_path, (*above, here)), (str(short(path)), tree)]


def _parse(path: Path) -> Tree:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if path.suffix != ".json":
            return tomllib.loads(text)
        written = json.loads(text)
        tree = written.get("recipe", written) if isinstance(written, dict) else written
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{short(path)}: not a recipe written by a run; found `{type(tree).__name__}` where a table belongs"
            )
        return tree
    except UnicodeDecodeError as problem:
        raise ConfigError(
            f"{short(path)}: not a text file in UTF-8; {problem.reason} at byte {problem.start}"
        ) from None
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{short(path)}: not TOML; {str(problem)[:1].lower()}{str(problem)[1:]}") from None
    except (json.JSONDecodeError, RecursionError) as problem:
        raise ConfigError(f"{short(path)}: not a recipe written by a run; {problem}") from None
    except OSError as problem:
        raise ConfigError(f"{short(path)}: cannot be read; {problem.strerror}") from None


def short(path: Path) -> Path:
    """Show a path from the current folder where it lies below it."""
    here, path = Path.cwd(), path.resolve()
    return path.relative_to(here) if path.is_relative_to(here) else path


def gather(overrides: Sequence[str]) -> Tree:
    """Turn `key.path=value` words into one tree; their order does not matter, except that a repeated key wins.

    Values are TOML; what is not TOML is taken as text, so `train.device=cuda:0` needs no quotes.
    """
    tree: Tree = {}
    for word in overrides:
        key, equals, value = word.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ConfigError(f"{COMMAND_LINE}: settings are given as key.path=value; found `{word}`")
        table = tree
        for name in names[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{COMMAND_LINE}: `{word}` reaches into a value that another word sets as a whole")
        if isinstance(table.get(names[-1]), dict):
            raise ConfigError(f"{COMMAND_LINE}: `{word}` sets as a whole what another word reaches into")
        table[names[-1]] = _value(value.strip())
    return tree


def _value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, datetime.date | datetime.time) else value


def leaves(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Return every value of a tree that is not a table, by its path."""
    found = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def load(schema: type[S], name_or_path: str | Path, overrides: Sequence[str] = (), only: str = "") -> Loaded[S]:
    """Read, merge and validate once: parents, then the recipe, then the overrides.

    Args:
        schema: Root of the settings.
        name_or_path: A recipe's path or shipped name.
        overrides: Words of the form `key.path=value`.
        only: If given, this table is validated and the others are left out.

    Raises:
        ConfigError: Every problem of the merged whole, one a line.
    """
    path = find_recipe(name_or_path)
    return _validate(schema, [*read(path), (COMMAND_LINE, gather(overrides))], path, only)


def load_words(schema: type[S], overrides: Sequence[str], path: Path | None = None) -> S:
    """Validate settings that need no recipe: defaults, then a file if there is one, then the overrides.

    Raises:
        ConfigError: Every problem of the merged whole, one a line.
    """
    below = read(path) if path is not None else []
    return _validate(schema, [*below, (COMMAND_LINE, gather(overrides))], path or Path(COMMAND_LINE)).settings


def _validate(schema: type[S], layers: Sequence[tuple[str, Tree]], path: Path, only: str = "") -> Loaded[S]:
    tree: Tree = {}
    for _, layer in layers:
        tree = merge(tree, layer)
    if only:
        tree = {name: value for name, value in tree.items() if name == only}
    written = [(origin, leaves(layer)) for origin, layer in reversed(layers)]

    def origin_of(place: str) -> str:
        keys = [key for name in place.split(",") for key in (name, name.partition("[")[0])]
        for origin, values in written:
            if any(key == leaf or leaf.startswith(f"{key}.") for key in keys for leaf in values if key):
                return origin
        return str(short(path))

    try:
        text = json.dumps(complete(schema, tree), default=str)
        settings = schema.model_validate_json(text, strict=True)
    except ValidationError as problem:
        raise ConfigError(explain(problem, schema, origin_of)) from None
    return Loaded(settings, {leaf: origin_of(leaf) for leaf in leaves(tree)}, path)


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return a training recipe by path or shipped name, with overrides laid over it."""
    return load(Recipe, name_or_path, overrides).settings


def load_model(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Model:
    """Return the network of a recipe; presets that hold only a model, such as `k3`, are read too."""
    return load(ModelOnly, name_or_path, overrides, only="model").settings.model


def load_either(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Loaded[Any]:
    """Load a training recipe, or a preset that holds nothing but a model."""
    tables = {name for _, layer in read(find_recipe(name_or_path)) for name in layer}
    return load(ModelOnly if tables == {"model"} else Recipe, name_or_path, overrides)


def purpose(name_or_path: str | Path) -> str:
    """Return the comment that a recipe's file opens with."""
    first = find_recipe(name_or_path).read_text(encoding="utf-8-sig").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
