"""Answers of a given form: which tokens may come next, from a grammar that starts once thinking has ended.

Control tokens stand in grammars as single characters that no text token can spell, so that a model which must write a
control token cannot write its name instead.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from triax.data.chat import k2, xtml
from triax.data.chat.tool import tool_name
from triax.data.tokenizer import Language
from triax.errors import ConfigError, TriaxError, UnsupportedError
from triax.serve.request import Structure

MARKS = (
    xtml.OPEN, xtml.CLOSE, xtml.SEP, xtml.END, k2.SECTION_BEGIN, k2.SECTION_END, k2.CALL_BEGIN, k2.CALL_ARGUMENTS,
    k2.CALL_END,
)  # fmt: skip
MARK_OF = {name: chr(0xE000 + number) for number, name in enumerate(MARKS)}
KEPT_BYTES = 256 << 20
PRIVATE = b"\xee"  # first byte of the characters that marks are; no text token with it is allowed
OPEN, CLOSE, SEP = (MARK_OF[name] for name in (xtml.OPEN, xtml.CLOSE, xtml.SEP))
TYPES = ("string", "number", "boolean", "null", "object", "array")
LOOSE, STRICT = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]"
COMPACT = {"any_whitespace": False, "separators": (",", ":")}


class Guide:
    """What one sequence's grammar permits.

    Args:
        matcher: Follows the grammar.
        after: Tokens whose end starts it; none starts it at once.
        vocab_size: Tokens that a mask covers.
    """

    def __init__(self, matcher: Any, after: Sequence[int], vocab_size: int) -> None:
        self._matcher, self._after, self._vocab_size = matcher, tuple(after), vocab_size
        self._tail: tuple[int, ...] = ()
        self.has_begun = not after
        """Whether the form has started."""

    def allowed(self, drafts: Sequence[int] = ()) -> list[Bool[Tensor, " V"] | None]:
        """Return what may stand in the place of each draft and after the last, as if those before it stayed.

        None permits everything. From the first draft on that the grammar forbids, the masks mean nothing.
        """
        masks: list[Tensor | None] = []
        tail, has_begun, pushed = self._tail, self.has_begun, 0
        for place in range(len(drafts) + 1):
            masks.append(self._mask() if has_begun else None)
            if place == len(drafts):
                break
            if has_begun:
                if self._matcher.is_terminated() or not self._matcher.accept_token(drafts[place]):
                    masks += masks[-1:] * (len(drafts) - place)
                    break
                pushed += 1
            else:
                tail = (*tail, drafts[place])[-len(self._after) :]
                has_begun = tail == self._after
        if pushed:
            self._matcher.rollback(pushed)
        return masks

    def _mask(self) -> Bool[Tensor, " V"] | None:
        import xgrammar

        if self._matcher.is_terminated():
            return None
        packed = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        self._matcher.fill_next_token_bitmask(packed)
        bits = (packed[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[: self._vocab_size].bool()

    def push(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens.

        Raises:
            TriaxError: The grammar forbids one.
        """
        for token in tokens:
            if not self.has_begun:
                self._tail = (*self._tail, token)[-len(self._after) :]
                self.has_begun = self._tail == self._after
            elif not self._matcher.is_terminated() and not self._matcher.accept_token(token):
                raise TriaxError(f"structure: the grammar forbids token `{token}`; found it drawn; report this")

    def restart(self, tokens: Sequence[int]) -> None:
        """Start again and go on by these tokens."""
        self._matcher.reset()
        self._tail, self.has_begun = (), not self._after
        self.push(tokens)


class Guides:
    """Compiles grammars for one vocabulary; those used last are kept.

    Args:
        tokenizer: Whose tokens answers are made of.
        kept_bytes: Memory for compiled grammars, and as much again for parts that several share.
    """

    def __init__(self, tokenizer: Language, kept_bytes: int = KEPT_BYTES) -> None:
        self._tokenizer, self._kept_bytes = tokenizer, kept_bytes
        self._control: Mapping[str, int] = getattr(tokenizer, "control", {})
        self._speaks_xtml = xtml.OPEN in self._control
        self._compiled: dict[tuple[str, str, str, bool], tuple[Any, int]] = {}

    def guide(self, structure: Structure) -> Guide:
        """Return a guide for one answer.

        Raises:
            ConfigError: The structure is no grammar, no schema, or has tools that this model cannot call.
            UnsupportedError: The grammar library is not installed.
        """
        self.prepare(structure)
        import xgrammar

        key = _key(structure)
        self._compiled[key] = found = self._compiled.pop(key)  # behind those that were used longer ago
        known = list(self._compiled.items())  # at once: another thread may be adding to them
        kept = sum(size for _, (_, size) in known)
        for old, (_, size) in known[:-1]:
            if kept <= self._kept_bytes:
                break
            kept -= size
            del self._compiled[old]
        return Guide(xgrammar.GrammarMatcher(found[0]), structure.after, self._tokenizer.vocab_size)

    def knows(self, structure: Structure) -> bool:
        """Whether the grammar of a structure is there."""
        return _key(structure) in self._compiled

    def prepare(self, structure: Structure) -> None:
        """Compile the grammar of a structure, so that `guide` is quick; another thread may do this meanwhile.

        Raises:
            ConfigError: As for `guide`.
            UnsupportedError: As for `guide`.
        """
        if self.knows(structure):
            return
        compiler = self._compiler
        try:
            compiled = compiler.compile_grammar(self._grammar(structure))
            self._compiled[_key(structure)] = compiled, compiled.memory_size_bytes
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as problem:
            if isinstance(problem, TriaxError):
                raise
            raise ConfigError(
                f"structure: {structure.kind} cannot be held to; found {_first_line(problem)}; correct it or leave it "
                "out"
            ) from None

    def warm(self) -> None:
        """Read the vocabulary, which takes a second for a large one and is done once.

        Raises:
            UnsupportedError: The grammar library is not installed.
        """
        _ = self._compiler

    @cached_property
    def _compiler(self) -> Any:
        try:
            import xgrammar
        except ImportError:
            raise UnsupportedError(
                "structure: answers of a given form need xgrammar; found none; install it with the extra `serve`"
            ) from None
        tokenizer = self._tokenizer
        control = set(self._control.values())
        marks = {self._control[name]: mark for name, mark in MARK_OF.items() if name in self._control}
        words: list[bytes] = []
        for token in range(tokenizer.vocab_size):
            if token in marks:
                words.append(marks[token].encode())
            elif token in control or token in tokenizer.ends or token in tokenizer.unsaid:
                words.append(b"")  # never part of a form
            else:
                word = tokenizer.token_bytes(token)
                words.append(b"" if PRIVATE in word else word)
        info = xgrammar.TokenizerInfo(
            words, xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=sorted(tokenizer.ends)
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=self._kept_bytes)

    def _grammar(self, structure: Structure) -> Any:
        import xgrammar

        grammar, is_open = xgrammar.Grammar, not structure.after
        if structure.kind == "grammar":
            return grammar.from_ebnf(structure.text)
        if structure.kind == "tools":
            return self._calls(structure.text, is_open=is_open)
        schema = '{"type": "object"}' if structure.kind == "json_object" else structure.text
        form = _json(schema)
        if self._speaks_xtml:
            opening = [_words(f"{OPEN}response{SEP}")] if structure.tools and not is_open else []
            form = grammar.concat(*opening, form, _words(f"{CLOSE}response{SEP}{CLOSE}message{SEP}"))
        return grammar.union(form, self._calls(structure.tools, is_open=is_open)) if structure.tools else form

    def _calls(self, text: str, *, is_open: bool) -> Any:
        tools = json.loads(text)
        if not tools:
            raise ConfigError("structure: there is nothing to call; found no tools; declare one")
        if self._speaks_xtml:
            return _xtml_calls(tools, is_open=is_open)
        if k2.CALL_BEGIN in self._control:
            return _k2_calls(tools)
        raise ConfigError("structure: this model has no format for tool calls; found none; leave tools out")


def _key(structure: Structure) -> tuple[str, str, str, bool]:
    return structure.kind, structure.text, structure.tools, not structure.after


def _json(schema: str) -> Any:
    """Return the grammar of compact JSON that fits a schema.

    The library lets strings of bounded length hold raw control characters, which JSON forbids; here they may not.
    """
    import xgrammar

    form = xgrammar.Grammar.from_json_schema(schema, **COMPACT)
    text = str(form)
    return xgrammar.Grammar.from_ebnf(text.replace(LOOSE, STRICT)) if LOOSE in text else form


def _words(text: str) -> Any:
    import xgrammar

    return xgrammar.Grammar.from_ebnf(f"root ::= {json.dumps(text, ensure_ascii=False)}")


def _repeated(call: Any, before: str, after: str) -> Any:
    """Return the grammar of one or more calls between two texts."""
    import xgrammar

    rules = re.sub(r"(?<![\w\"])root(?![\w\"])", "call", str(call))
    first, last = (json.dumps(part, ensure_ascii=False) for part in (before, after))
    return xgrammar.Grammar.from_ebnf(f"root ::= {first} call call* {last}\n{rules}")


def _xtml_calls(tools: Sequence[Mapping[str, Any]], *, is_open: bool) -> Any:
    """Return the grammar of an empty response and the tools section behind it."""
    import xgrammar

    grammar = xgrammar.Grammar
    calls = []
    for tool in tools:
        schema = tool["function"].get("parameters") or {}
        required = set(schema.get("required") or ())
        head = f'{OPEN}call tool="{xtml.escape(tool_name(tool))}" index="'
        parts = [_words(head), grammar.from_ebnf("root ::= [1-9] [0-9]?"), _words(f'"{SEP}')]
        for key, value in (schema.get("properties") or {}).items():
            argument = _xtml_argument(key, value, schema)
            parts.append(argument if key in required else grammar.union(argument, grammar.from_ebnf('root ::= ""')))
        parts.append(_words(f"{CLOSE}call{SEP}"))
        calls.append(grammar.concat(*parts))
    call = calls[0] if len(calls) == 1 else grammar.union(*calls)
    opening = "" if is_open else f"{OPEN}response{SEP}"
    before = f"{opening}{CLOSE}response{SEP}{OPEN}tools{SEP}"
    return _repeated(call, before, f"{CLOSE}tools{SEP}{CLOSE}message{SEP}")


def _xtml_argument(key: str, schema: Any, root: Mapping[str, Any]) -> Any:
    import xgrammar

    grammar = xgrammar.Grammar
    forms = []
    for kind, part in _kinds(schema, root):
        if kind == "string":
            choices = part.get("enum") or ([part["const"]] if "const" in part else None)
            if choices:
                value = grammar.union(*map(_words, choices)) if len(choices) > 1 else _words(choices[0])
            else:
                low, high = part.get("minLength", 0), part.get("maxLength", "")
                value = grammar.from_ebnf(f"root ::= [^\\uE000-\\uF8FF]{{{low},{high}}}")
        else:
            value = _json(json.dumps(part))
        head = _words(f'{OPEN}argument key="{xtml.escape(key)}" type="{kind}"{SEP}')
        forms.append(grammar.concat(head, value, _words(f"{CLOSE}argument{SEP}")))
    return forms[0] if len(forms) == 1 else grammar.union(*forms)


def _kinds(schema: Any, root: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the types that a property may have, each with the schema of its values."""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    waiting, followed = [schema], set()
    while waiting:
        one = waiting.pop(0)
        if not isinstance(one, Mapping):
            one = {}
        if isinstance(path := one.get("$ref"), str) and path.startswith("#/"):
            if path not in followed:  # each once, however many ways lead to it
                followed.add(path)
                waiting.insert(0, reduce(lambda tree, step: tree[step], path[2:].split("/"), root))
            continue
        several = next((one[word] for word in ("anyOf", "oneOf") if isinstance(one.get(word), list)), None)
        if several is not None:
            waiting[:0] = several
            continue
        for kind, part in _plain_kinds(one):
            found.setdefault(json.dumps([kind, part], sort_keys=True), (kind, {**shared, **part}))
    if not found:
        raise ConfigError("structure: a property has no form; found references that lead nowhere; correct it")
    return list(found.values())


def _plain_kinds(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if values:
        groups: dict[str, list[Any]] = {}
        for value in values:
            groups.setdefault(xtml.type_name(value), []).append(value)
        return [(kind, {"enum": group}) for kind, group in groups.items()]
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    return [("number" if kind == "integer" else kind, {**schema, "type": kind}) for kind in kinds]


def _k2_calls(tools: Sequence[Mapping[str, Any]]) -> Any:
    import xgrammar

    grammar = xgrammar.Grammar
    begin, arguments, end = (MARK_OF[name] for name in (k2.CALL_BEGIN, k2.CALL_ARGUMENTS, k2.CALL_END))
    calls = [
        grammar.concat(
            _words(f"{begin}functions.{tool_name(tool)}:"),
            grammar.from_ebnf("root ::= [0-9]{1,3}"),
            _words(arguments),
            _json(json.dumps(tool["function"].get("parameters") or {"type": "object"})),
            _words(end),
        )
        for tool in tools
    ]
    call = calls[0] if len(calls) == 1 else grammar.union(*calls)
    return _repeated(call, MARK_OF[k2.SECTION_BEGIN], MARK_OF[k2.SECTION_END])


def _first_line(problem: Exception) -> str:
    line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)[:200]  # the library begins with the time and its own file
