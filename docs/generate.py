"""Write the reference pages from what they describe: settings from the schema, verbs from the command tree, records.

Run: python docs/generate.py (part of `make docs`); a test holds that the pages are current.
"""

from pathlib import Path
from typing import get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from triax.cli.app import app
from triax.config.schema import alternatives, element, kind_name, tables
from triax.config.serve import Serve
from triax.config.settings import Settings
from triax.config.show import toml
from triax.config.train import Recipe
from triax.serve import json_schema

FOLDER = Path(__file__).parent / "reference"
WIDTH = 112  # of the help texts: wide enough for every summary of a verb


OF_RECIPES = """\
# Settings

Every table and setting of a recipe, generated from the schema. A recipe is a TOML file; `extends` names a
parent; `key.path=value` on the command line is laid over it; the whole is validated once.
The word `none` turns off what can be off. How recipes work: [Recipes](../guides/recipes.md).
"""
OF_SERVERS = """\
# Settings of the server

Every table and setting of `triax serve`, generated from the schema. They are given as `key.path=value` on the command
line, or in a TOML file with `--settings`; the whole is validated once. The word `none` turns off what can be off.
How servers are run: [Serving](../guides/serve.md).
"""


OF_SCHEMAS = """
## Keywords of JSON schemas

What `response_format`, forced calls and tools with `strict` may ask for, generated from the code. A keyword that cannot
be held is refused with status 400, its name in the message and its place in `param`. What is written may be narrower
than the schema, never wider: JSON has no blanks, properties stand in the order of their declaration, numbers without
bounds have at most 18 digits before the point.
"""


def settings_page() -> str:
    """Return the page of all settings of a recipe."""
    return tables_page(OF_RECIPES, Recipe, "The recipe")


def server_page() -> str:
    """Return the page of all settings of a server."""
    return tables_page(OF_SERVERS, Serve, "The server") + schemas_section()


def schemas_section() -> str:
    """Return what becomes of each keyword of a JSON schema."""
    lines = OF_SCHEMAS.split("\n")
    lines += ["| keyword | in forms, and in calls of K3 and K2 | within |", "|---|---|---|"]
    lines += [f"| `{name}` | held | {_cell(remark)} |" for name, remark in json_schema.HELD.items()]
    lines += [f"| `{name}` | refused | {_cell(remark)} |" for name, remark in json_schema.REFUSED.items()]
    formats, others = (", ".join(f"`{one}`" for one in names) for names in (
        (*json_schema.FORMATS, *json_schema.OF_NUMBERS), json_schema.REFUSED_FORMATS))  # fmt: skip
    silent = ", ".join(f"`{name}`" for name in json_schema.ANNOTATIONS)
    lines += [
        "",
        f"Formats that are held: {formats}. Refused: {others}. Others ask nothing, as the standard has it.",
        "",
    ]
    lines += [f"Keywords that ask nothing of a value, as any that the standard does not know: {silent}.", ""]
    return "\n".join(lines)


def tables_page(begin: str, root: type[Settings], name_of_root: str) -> str:
    """Return a page of settings: one section a table, one row a setting."""
    lines = begin.split("\n")
    todo: list[tuple[str, type[Settings]]] = [("", root)]
    while todo:
        path, table = todo.pop(0)
        kind = own_kind(table)
        title = f"{path} (kind `{kind}`)" if kind else path or name_of_root
        lines += [f"## {title}", "", (table.__doc__ or "").split("\n\n")[0].replace("\n", " "), ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for name, field in table.model_fields.items():
            if name == "kind" and kind:
                continue
            lines.append(f"| `{name}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |")
            inner = element(field.annotation)
            place = f"{path}.{name}".lstrip(".") + ("[]" if inner is not None else "")
            todo += [(place, choice) for choice in tables(inner if inner is not None else field.annotation)]
        lines.append("")
    return "\n".join(lines)


def own_kind(table: type[Settings]) -> str | None:
    """Return the `kind` that chooses a table; a table whose kind is a choice of its own has none."""
    field = table.model_fields.get("kind")
    return kind_name(table) if field is not None and len(get_args(field.annotation)) == 1 else None


def _type(field: FieldInfo) -> str:
    if get_origin(field.annotation) is dict:
        return "tables by name"
    inner = element(field.annotation)
    if inner is not None:
        return "list of tables" if tables(inner) else f"list of {_words(inner)}"
    text = "table" if tables(field.annotation) else _words(field.annotation)
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(rule, name, None) is not None
    ]
    off = " or `none`" if type(None) in alternatives(field.annotation) else ""
    return f"{text}{off}" + (f", {', '.join(bounds)}" if bounds else "")


def _words(annotation: object) -> str:
    known = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}
    for kind in alternatives(annotation):
        if kind in known:
            return known[kind]
        if choices := getattr(kind, "__args__", None):
            return " or ".join(f"`{choice}`" for choice in choices)
    return "value"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, dict):
        return ", ".join(f"`{name}`" for name in default)
    if isinstance(default, Settings):
        kind = own_kind(type(default))
        return f"kind `{kind}`" if kind else "its own defaults"
    return "`none`" if default is None else f"`{_cell(toml(default))}`"


def _cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def commands_page() -> str:
    """Return the page of all verbs: the help text of each, as a wide terminal shows it."""
    lines = ["# Commands", "", "What each verb says about itself, generated from the program.", ""]
    lines += ["Exit status: 0 done, 1 failed, 2 misused. Results go to stdout, everything else to stderr.", ""]
    for words in verbs():
        shown = CliRunner().invoke(app, [*words, "--help"], prog_name="triax", terminal_width=WIDTH)
        lines += [f"## {' '.join(['triax', *words])}", "", "```text", shown.output.strip(), "```", ""]
    return "\n".join(lines)


def verbs() -> list[tuple[str, ...]]:
    """Return the words of every verb, the bare program first."""
    found: list[tuple[str, ...]] = []
    todo: list[tuple[tuple[str, ...], object]] = [((), typer.main.get_command(app))]
    while todo:
        words, command = todo.pop(0)
        found.append(words)
        todo += [((*words, name), verb) for name, verb in getattr(command, "commands", {}).items()]
    return found


def figures_page() -> str:
    """Return the list of all records: the date and the question of each, the newest first."""
    lines = ["# Figures", "", "Every record: what was to be known, and where the answer stands."]
    lines += ["The form of a record: [Records](../records/README.md).", "", "| date | question |", "|---|---|"]
    for path in sorted((FOLDER.parent / "records").glob("2*.md"), reverse=True):
        question = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"| {path.name[:10]} | [{_cell(question)}](../records/{path.name}) |")
    return "\n".join([*lines, ""])


PAGES = {
    "settings.md": settings_page,
    "server.md": server_page,
    "commands.md": commands_page,
    "figures.md": figures_page,
}


def main() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


if __name__ == "__main__":
    main()
