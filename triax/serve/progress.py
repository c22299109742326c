"""What has been told of one request: tokens become text, and one of them ends it."""

from collections.abc import Sequence as Many

from triax.data.tokenizer import Language
from triax.serve.plan import RowResult
from triax.serve.request import FinishReason, TokenInfo, Update, Usage
from triax.serve.sequence import Sequence
from triax.serve.text import Text


class Progress:
    """One request on its way out.

    Args:
        sequence: What the scheduler knows of it.
        tokenizer: Whose text it is.
    """

    def __init__(self, sequence: Sequence, tokenizer: Language) -> None:
        self.sequence, self.request = sequence, sequence.request
        self._text = Text(tokenizer, self.request.stop)
        self._ends = frozenset(self.request.stop_ids) | (frozenset() if self.request.ignore_ends else tokenizer.ends)
        self._prompt: dict[int, TokenInfo] = {}
        self._has_begun = False
        self.num_tokens = 0
        """Tokens told."""
        self.finish_reason: FinishReason | None = None

    def note_prompt(self, first: int, infos: Many[TokenInfo]) -> None:
        """Keep how likely prompt tokens were, the first of them at place `first` of the prompt."""
        self._prompt.update(enumerate(infos, first))

    def advance(self, result: RowResult) -> Update | None:
        """Take over a row's new tokens; tokens after one that ends the answer are dropped."""
        if not result.is_valid:
            return self.finish(
                "invalid", error=f"request {self.request.id}: logits were no distribution; found NaN or infinity"
            )
        infos = result.infos or tuple(TokenInfo(token, 0.0) for token in result.tokens)
        told: list[TokenInfo] = []
        pieces: list[str] = []
        stopped_by: str | int | None = None
        for info in infos:
            if self.num_tokens == self.request.max_tokens:
                self.finish_reason = "length"
                break
            if info.token in self._ends:
                self.finish_reason, stopped_by = "stop", info.token
                break
            told.append(info)
            self.num_tokens += 1
            pieces.append(self._text.push(info.token))
            if self._text.has_stopped:
                self.finish_reason, stopped_by = "stop", self._text.stopped_by
                break
        if self.finish_reason is None and self.num_tokens >= self.request.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            pieces.append(self._text.flush())
        elif not told:
            return None
        return self._update("".join(pieces), tuple(told), stopped_by)

    def finish(self, reason: FinishReason, error: str | None = None) -> Update:
        """End it for a reason that is not its tokens'."""
        self.finish_reason = reason
        return self._update(self._text.flush(), (), None, error)

    def _update(
        self, text: str, tokens: tuple[TokenInfo, ...], stopped_by: str | int | None, error: str | None = None
    ) -> Update:
        usage = None
        if self.finish_reason is not None or not self._has_begun:
            usage = Usage(
                len(self.request.tokens),
                self.sequence.cached_tokens or 0,
                self.sequence.matched_tokens,
                self.num_tokens if self.finish_reason is not None else 0,
                self.sequence.drafted,
                self.sequence.accepted,
            )
        prompt: tuple[TokenInfo, ...] = ()
        if not self._has_begun and self._prompt:
            prompt = tuple(self._prompt[place] for place in sorted(self._prompt))
        self._has_begun = True
        return Update(self.request.id, text, tokens, prompt, self.finish_reason, stopped_by, usage, error)
