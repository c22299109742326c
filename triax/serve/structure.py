"""Answers of a given form: which tokens may come next.

Grammars are built as trees (`answer_grammar`, `json_schema`) and printed once (`ebnf`). Control tokens stand in them by
their number, and no text spells one: to the grammar library they look like bytes that no UTF-8 has.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from triax.data.tokenizer import Language
from triax.errors import ConfigError, TriaxError, UnsupportedError
from triax.serve.answer_grammar import Vocabulary, build
from triax.serve.request import Structure

KEPT_BYTES = 256 << 20
FORM_SHARE = 4  # thinking leaves this part of an answer's tokens to the form
NO_TEXT = b"\xff"  # begins the bytes of control tokens


class Guide:
    """What one sequence's grammar permits.

    Args:
        matcher: Follows the grammar.
        vocab_size: Tokens that a mask covers.
        opener: Token that begins thinking, where the answer does not begin inside it.
        closer: Token that begins the end of thinking.
        budget: Tokens of thinking, after which its end is forced; None sets no limit.
        is_thinking: Whether the answer begins inside thinking.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        opener: int | None = None,
        closer: int | None = None,
        budget: int | None = None,
        *,
        is_thinking: bool = False,
    ) -> None:
        self._matcher, self._vocab_size, self._budget = matcher, vocab_size, budget
        self._opener, self._closer, self._begins_thinking = opener, closer, is_thinking
        self._thoughts = 0 if is_thinking else None
        self._is_new = True

    def allowed(self, drafts: Sequence[int] = ()) -> list[Bool[Tensor, " V"] | None]:
        """Return what may stand in the place of each draft and after the last, as if those before it stayed.

        None permits everything. From the first draft on that the grammar forbids, the masks mean nothing.
        """
        masks: list[Tensor | None] = []
        thoughts, is_new, pushed = self._thoughts, self._is_new, 0
        for place in range(len(drafts) + 1):
            masks.append(self._mask(thoughts))
            if place == len(drafts):
                break
            if self._matcher.is_terminated() or not self._matcher.accept_token(drafts[place]):
                masks += masks[-1:] * (len(drafts) - place)
                break
            pushed += 1
            thoughts, is_new = self._count(drafts[place], thoughts, is_new=is_new), False
        if pushed:
            self._matcher.rollback(pushed)
        return masks

    def _mask(self, thoughts: int | None) -> Bool[Tensor, " V"] | None:
        import xgrammar

        if self._matcher.is_terminated():
            return None
        packed = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        self._matcher.fill_next_token_bitmask(packed)
        bits = (packed[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        mask = bits.flatten()[: self._vocab_size].bool()
        if thoughts is not None and self._budget is not None and thoughts >= self._budget and mask[self._closer]:
            closing = torch.zeros_like(mask)
            closing[self._closer] = True
            return closing
        return mask

    def _count(self, token: int, thoughts: int | None, *, is_new: bool) -> int | None:
        """Return the tokens of thinking so far, None outside of it."""
        if thoughts is not None:
            return None if token == self._closer else thoughts + 1
        return 0 if is_new and token == self._opener else None

    def push(self, tokens: Sequence[int]) -> None:
        """Go on by these tokens.

        Raises:
            TriaxError: The grammar forbids one.
        """
        for token in tokens:
            self._thoughts, self._is_new = self._count(token, self._thoughts, is_new=self._is_new), False
            if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
                raise TriaxError(f"structure: the grammar forbids token `{token}`, which was drawn; report this")

    def restart(self, tokens: Sequence[int]) -> None:
        """Start again and go on by these tokens."""
        self._matcher.reset()
        self._thoughts, self._is_new = (0 if self._begins_thinking else None), True
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
        self._compiled: dict[Structure, tuple[Any, int]] = {}

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        tokenizer = self._tokenizer
        return Vocabulary(self._control, frozenset(tokenizer.ends) | frozenset(tokenizer.unsaid))

    def guide(self, structure: Structure, max_tokens: int | None = None) -> Guide:
        """Return a guide for one answer.

        Args:
            structure: Its form.
            max_tokens: Most tokens of the answer; thinking leaves a part of them to the form. None bounds nothing.

        Raises:
            ConfigError: The structure is no grammar, no schema, or has tools that this model cannot call.
            UnsupportedError: The grammar library is not installed.
        """
        self.prepare(structure)
        import xgrammar

        self._compiled[structure] = found = self._compiled.pop(structure)  # behind those that were used longer ago
        known = list(self._compiled.items())  # at once: another thread may be adding to them
        kept = sum(size for _, (_, size) in known)
        for old, (_, size) in known[:-1]:
            if kept <= self._kept_bytes:
                break
            kept -= size
            del self._compiled[old]
        opener, closer = self._vocabulary.thinking
        is_bounded = max_tokens is not None and structure.kind != "auto" and closer is not None
        return Guide(
            xgrammar.GrammarMatcher(found[0]),
            self._tokenizer.vocab_size,
            opener if structure.thinking == "may" else None,
            closer,
            max_tokens - -(-max_tokens // FORM_SHARE) if is_bounded and max_tokens is not None else None,
            is_thinking=structure.thinking == "open",
        )

    def knows(self, structure: Structure) -> bool:
        """Whether the grammar of a structure is there."""
        return structure in self._compiled

    def prepare(self, structure: Structure) -> None:
        """Compile the grammar of a structure, so that `guide` is quick; another thread may do this meanwhile.

        Raises:
            ConfigError: As for `guide`.
            UnsupportedError: As for `guide`.
        """
        if self.knows(structure):
            return
        compiler = self._compiler
        text = structure.text
        if structure.kind != "grammar":
            grammar, root = build(structure, self._vocabulary)
            text = grammar.ebnf(root)
        try:
            compiled = compiler.compile_grammar(text)
            self._compiled[structure] = compiled, compiled.memory_size_bytes
        except (RuntimeError, ValueError, TypeError) as problem:
            raise ConfigError(
                f"structure: {structure.kind} cannot be held to ({_first_line(problem)}); correct it or leave it out"
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
        control = frozenset(self._control.values())
        words: list[bytes] = []
        for token in range(tokenizer.vocab_size):
            if token in control and token not in tokenizer.ends and token not in tokenizer.unsaid:
                words.append(NO_TEXT + token.to_bytes(4))
            elif token in control or token in tokenizer.ends or token in tokenizer.unsaid:
                words.append(b"")  # never part of a form
            else:
                words.append(tokenizer.token_bytes(token))
        info = xgrammar.TokenizerInfo(
            words, xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=sorted(tokenizer.ends)
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=self._kept_bytes)


def _first_line(problem: Exception) -> str:
    line = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line)[:200]  # the library begins with the time and its own file
