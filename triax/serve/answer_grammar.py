"""What an answer of a given form may be, in the format of its model: thinking, then JSON, calls, or text with calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triax.data.chat import k2, xtml
from triax.data.chat.tool import Tool, tool_name
from triax.errors import ConfigError
from triax.serve.ebnf import (  # fmt: skip
    EMPTY,
    NOTHING,
    Chars,
    Grammar,
    Node,
    OtherTokens,
    Text,
    Token,
    choice,
    optional,
    repeat,
    sequence,
)
from triax.serve.json_schema import Part, Parts, Schema, SchemaError, kinds_of, literal
from triax.serve.request import Structure
from triax.serve.schema_grammar import JSON_MEMBERS, Members, Writer, checked, in_attribute, json_form

ANY_OBJECT = {"type": "object"}
DIGIT, FIRST_DIGIT = Chars(((48, 57),)), Chars(((49, 57),))


@dataclass(frozen=True)
class Vocabulary:
    """What grammars need to know of a tokenizer.

    Args:
        control: Control tokens by name.
        silent: Other tokens that are no text.
    """

    control: Mapping[str, int]
    silent: frozenset[int] = frozenset()

    @property
    def has_xtml(self) -> bool:
        """Whether K3's format is spoken."""
        return xtml.OPEN in self.control

    @property
    def thinking(self) -> tuple[int | None, int | None]:
        """The token that opens thinking where the model itself does that, and the one that begins its end."""
        if self.has_xtml:
            return None, self.control[xtml.CLOSE]
        return self.control.get(k2.THINK), self.control.get(k2.THINK_END)

    def tag(self, marker: str, name: str) -> Node:
        """Return one of K3's tags without attributes."""
        return sequence(Token(self.control[marker]), Text(name), Token(self.control[xtml.SEP]))

    def text(self, *allowed: str) -> Node:
        """Return any text: all tokens but control tokens, some of which may be allowed."""
        ids = {id_ for name, id_ in self.control.items() if name not in allowed} | self.silent
        return OtherTokens(tuple(sorted(ids)))


def build(structure: Structure, vocabulary: Vocabulary) -> tuple[Grammar, Node]:
    """Return the grammar of an answer, from its first token to its last before the end.

    Raises:
        ConfigError: The form cannot be held to.
    """
    grammar = Grammar()
    if structure.kind in ("tools", "auto"):
        tools = _tools(structure.text)
        calls = _calls(grammar, tools, vocabulary, structure)
    else:
        calls = _calls(grammar, _tools(structure.tools), vocabulary, structure) if structure.tools else NOTHING
    form = NOTHING
    if structure.kind in ("json_object", "json_schema"):
        tree = ANY_OBJECT if structure.kind == "json_object" else _tree(structure.text)
        form = json_form(grammar, tree, "structure")
    body = _xtml_body if vocabulary.has_xtml else _k2_body
    return grammar, body(structure, vocabulary, form, calls)


def _tree(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"structure: is no JSON ({problem}); correct it") from None


def _tools(text: str) -> Sequence[Tool]:
    tools = _tree(text)
    if not tools:
        raise ConfigError("structure: there is nothing to call; declare a tool")
    return tools


def _xtml_body(structure: Structure, vocabulary: Vocabulary, form: Node, calls: Node) -> Node:
    tag = vocabulary.tag
    closing = tag(xtml.CLOSE, "response")
    end = tag(xtml.CLOSE, "message")
    opening = tag(xtml.OPEN, "response") if structure.thinking else EMPTY
    thoughts = sequence(vocabulary.text(), tag(xtml.CLOSE, "think")) if structure.thinking else EMPTY
    if structure.kind == "auto":
        said = sequence(opening, vocabulary.text(), optional(sequence(closing, choice(end, calls))))
        return optional_rest(vocabulary.text(), tag(xtml.CLOSE, "think"), said) if structure.thinking else said
    ways = [sequence(form, closing, end)] if form != NOTHING else []
    ways += [sequence(closing, calls)] if calls != NOTHING else []
    return sequence(thoughts, opening, choice(*ways))


def optional_rest(free: Node, *rest: Node) -> Node:
    """Return free text that may end at any place, or go on."""
    return sequence(free, optional(sequence(*rest)))


def _k2_body(structure: Structure, vocabulary: Vocabulary, form: Node, calls: Node) -> Node:
    control = vocabulary.control
    if structure.kind == "auto":
        return optional_rest(vocabulary.text(k2.THINK, k2.THINK_END), calls)
    body = choice(*(way for way in (form, calls) if way != NOTHING))
    if not structure.thinking or k2.THINK_END not in control:
        return body
    thoughts = sequence(vocabulary.text(), Token(control[k2.THINK_END]))
    if structure.thinking == "may":
        thoughts = optional(sequence(Token(control[k2.THINK]), thoughts))
    return sequence(thoughts, body)


def _calls(grammar: Grammar, tools: Sequence[Tool], vocabulary: Vocabulary, structure: Structure) -> Node:
    """Return the grammar of a section of calls."""
    control, tag = vocabulary.control, vocabulary.tag
    if vocabulary.has_xtml:
        before, after = tag(xtml.OPEN, "tools"), sequence(tag(xtml.CLOSE, "tools"), tag(xtml.CLOSE, "message"))
    elif k2.CALL_BEGIN in control:
        before, after = Token(control[k2.SECTION_BEGIN]), Token(control[k2.SECTION_END])
    else:
        raise ConfigError("structure: this model has no format for tool calls; leave tools out")
    calls: list[Node] = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        is_free = structure.kind == "auto" and not function.get("strict")
        tree = None if is_free else function.get("parameters") or ANY_OBJECT
        calls.append(call(grammar, tool_name(tool), tree, vocabulary, f"tools[{number}].function.parameters"))
    return sequence(before, repeat(grammar.rule(choice(*calls)), 1, 1 if structure.is_single else None), after)


def call(grammar: Grammar, name: str, tree: Any, vocabulary: Vocabulary, where: str) -> Node:
    """Return the grammar of one call; without a schema its arguments are free.

    Raises:
        SchemaError: Its arguments cannot be held to their schema.
    """
    control, tag = vocabulary.control, vocabulary.tag
    if not vocabulary.has_xtml:
        head = sequence(Token(control[k2.CALL_BEGIN]), Text(f"functions.{name}:"), repeat(DIGIT, 1, 3))
        arguments = vocabulary.text() if tree is None else _arguments(grammar, tree, where, JSON_MEMBERS)
        return sequence(head, Token(control[k2.CALL_ARGUMENTS]), arguments, Token(control[k2.CALL_END]))
    index = sequence(FIRST_DIGIT, optional(DIGIT))
    separator = Token(control[xtml.SEP])
    head = sequence(
        Token(control[xtml.OPEN]), Text(f'call tool="{xtml.escape(name)}" index="'), index, Text('"'), separator
    )
    if tree is None:
        text, open_, close = vocabulary.text(), Token(control[xtml.OPEN]), Token(control[xtml.CLOSE])
        value = sequence(open_, text, separator, text, close, text, separator)
        return sequence(head, repeat(grammar.rule(value)), tag(xtml.CLOSE, "call"))

    def argument(writer: Writer, key: Node, parts: Parts) -> Node:
        ways = [
            sequence(Text(f'" type="{kind}"'), separator, value) for kind, value in writer.bare_kinds(parts).items()
        ]
        if not ways:
            return NOTHING
        opener = sequence(Token(control[xtml.OPEN]), Text('argument key="'))
        return sequence(opener, key, grammar.rule(choice(*ways)), tag(xtml.CLOSE, "argument"))

    members = Members("", "", "", in_attribute, xtml.escape, argument)
    return sequence(head, _arguments(grammar, tree, where, members), tag(xtml.CLOSE, "call"))


def _arguments(grammar: Grammar, tree: Any, where: str, members: Members) -> Node:
    """Return the grammar of an object of arguments, whatever else a schema would allow."""
    schema = Schema(tree, where)
    writer = Writer(schema, grammar)
    ways: list[Node] = []
    for parts in schema.alternatives(schema.top):
        values = writer.values_of(parts)
        if values is not None:
            ways += [_written(writer, value, members) for value in values if isinstance(value, dict)]
        elif all("object" in kinds_of(part.schema) for part in parts):
            ways.append(writer.object(parts, members))
    return checked(grammar, schema, choice(*ways))


def _written(writer: Writer, value: Mapping[str, Any], members: Members) -> Node:
    """Return the grammar of exactly one object."""
    parts: list[Node] = []
    for name, inner in value.items():
        exactly = frozenset({Part(f"{writer.schema.where}={literal([name, inner])}", {"const": inner})})
        parts += [Text(members.comma)] if parts and members.comma else []
        parts.append(members.member(writer, Text(members.key(name)), exactly))
    return sequence(Text(members.opening), *parts, Text(members.closing))


def check_call(tree: Any, vocabulary: Vocabulary, where: str) -> None:
    """Refuse arguments that a call cannot be held to.

    Raises:
        SchemaError: A keyword cannot be held, or no object fits.
    """
    call(Grammar(), "f", tree, vocabulary, where)


def check_form(tree: Any, where: str) -> None:
    """Refuse a schema that an answer cannot be held to.

    Raises:
        SchemaError: A keyword cannot be held, or no value fits.
    """
    json_form(Grammar(), tree, where)


__all__ = ["SchemaError", "Vocabulary", "build", "check_call", "check_form"]
