"""A checkpoint in this process as somebody to talk to; the prompt and the answer are those of the server."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from triax.config.serve import Serve
from triax.data.chat import Arguments, CallStart, Content, Promoted, Reasoning
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import ConfigError
from triax.serve.converse import Message, Piece
from triax.serve.engine import Engine
from triax.serve.http.answer import Turn, Whole
from triax.serve.http.model import open_model
from triax.serve.http.prompt import prepare_chat, requests_of
from triax.serve.http.schema import ChatRequest
from triax.serve.process import facts_of


class Local:
    """An engine of our own.

    Args:
        engine: That answers.
        folder: Of its weights.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        settings = engine.settings or Serve()
        assert isinstance(engine.tokenizer, Tokenizer | KimiTokenizer)
        self.model = open_model(folder, engine.tokenizer, facts_of(engine, settings), settings)
        self.name = self.model.name
        self.is_base = self.model.format == "text"
        self._numbers = itertools.count()

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Iterator[Piece]:
        """Answer, piece by piece; leaving early ends the answer.

        Raises:
            ConfigError: An option is wrong.
            DataError: A message cannot be rendered.
        """
        try:
            body = ChatRequest.model_validate({"model": self.name, "messages": list(messages)} | dict(options))
        except ValidationError as problem:
            first = problem.errors()[0]
            raise ConfigError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}; found `{first['input']}`") from None
        prepared = prepare_chat(self.model, body, {})
        (request,) = requests_of(self.model, prepared, body, f"chat-{next(self._numbers)}", body.max_tokens)
        turn, whole = Turn(self.model, prepared), Whole()
        self.engine.add(request)
        try:
            while turn.reason is None:
                for update in self.engine.step():
                    if update.id != request.id:
                        continue
                    piece = Piece()
                    for event in turn.read(update):
                        whole.add(event)
                        match event:
                            case Reasoning(text):
                                piece.thought += text
                            case Content(text) | Promoted(text):
                                piece.text += text
                            case CallStart(_, _, name):
                                piece.call += f"\n{name} "
                            case Arguments(_, text):
                                piece.call += text
                    yield piece
        finally:
            self.engine.abort(request.id)
        told: dict[str, Any] = {"role": "assistant", "content": whole.content}
        told |= {"reasoning_content": whole.reasoning} if whole.reasoning else {}
        told |= {"tool_calls": whole.calls} if turn.reason == "tool_calls" else {}
        yield Piece(reason=turn.reason, told=told)

    def stream(self, prompt: str, max_tokens: int, **options: Any) -> Iterator[str]:
        """Continue a text, piece by piece."""
        return self.engine.stream(prompt, max_tokens, **options)
