"""`/v1/completions`: text goes on, without any chat format."""

import codecs
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from triax.errors import DataError
from triax.serve.http.answer import run, unless_gone, usage_tree
from triax.serve.http.face import DONE, SIGN_OF_LIFE, STREAMED, Face, StrictRoute, dumps, event
from triax.serve.http.fault import Fault, refuse
from triax.serve.http.model import Model
from triax.serve.http.prompt import Prepared, check_fixed, requests_of
from triax.serve.http.schema import CompletionRequest
from triax.serve.request import Request, TokenInfo, Update, Usage

MAX_PROMPTS = 256


def router(face: Face) -> APIRouter:
    """Return the endpoint."""
    routes = APIRouter(route_class=StrictRoute, tags=["generate"])

    @routes.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
        """Continue texts."""
        model = face.admit(body.model, (body.n or 1) * _num_prompts(body))
        if face.settings.http.has_fixed_sampling:
            check_fixed(model, body, thinking=False)
        id_ = f"cmpl-{uuid4().hex}"
        prompts = await face.prepare(request, lambda: read_prompts(model, body))
        requests = [
            one
            for number, tokens in enumerate(prompts)
            for one in requests_of(
                model,
                Prepared(tokens, len(tokens)),
                body,
                f"{id_}.{number}",
                16 if body.max_tokens is None else body.max_tokens,
                stop=tuple(body.stop or ()),
                top_logprobs=body.logprobs,
                score_prompt=bool(body.echo) and body.logprobs is not None,
                deadline_s=face.settings.http.deadline_s,
            )
        ]
        answer = Completions(face, model, prompts, body, requests, id_)
        if body.stream:
            return await face.stream(request, answer.chunks())
        return Response(dumps(await unless_gone(request, answer.whole())), media_type="application/json")

    return routes


def _num_prompts(body: CompletionRequest) -> int:
    prompt = body.prompt
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def read_prompts(model: Model, body: CompletionRequest) -> list[list[int]]:
    """Return the tokens of each prompt; an empty one starts from the model's first token.

    Raises:
        DataError: One is no text, or holds tokens that the model does not have.
        Fault: There are none, or too many.
    """
    given = body.prompt
    if isinstance(given, list) and not given:
        raise refuse("prompt: is empty; found no text; give one")
    texts: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    if len(texts) > MAX_PROMPTS:
        raise refuse(f"prompt: too many; found {len(texts)}; send at most {MAX_PROMPTS} at once")
    prompts = []
    for number, text in enumerate(texts):
        if isinstance(text, str):
            try:
                tokens = model.encode(text)
            except DataError as problem:
                raise refuse(f"prompt[{number}]: {problem}") from None
        else:
            tokens = list(text)
            model.check_tokens(tokens, f"prompt[{number}]")
        prompts.append(tokens or [model.tokenizer.start])
    return prompts


@dataclass
class Choice:
    """One continuation while it is written."""

    text: str = ""
    reason: str | None = None
    stopped_by: str | int | None = None
    usage: Usage | None = None
    num_tokens: int = 0
    num_thinking: int = 0
    tokens: list[int] = field(default_factory=list)
    infos: list[TokenInfo] = field(default_factory=list)
    scores: list[TokenInfo] = field(default_factory=list)
    offset: int = 0
    """Characters of the tokens whose logprobs were told."""
    decoded: Callable[[bytes], str] = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace").decode
    )
    """Turns the bytes of tokens into characters, of which one may be made of several tokens."""

    def read(self, update: Update) -> None:
        """Take an update.

        Raises:
            Fault: The engine could not go on.
        """
        if update.finish_reason in ("invalid", "error"):
            message = update.error or f"engine: the text broke off; found `{update.finish_reason}`; send it again"
            raise Fault(500, message, code=f"{update.finish_reason}_output")
        self.text += update.text
        self.usage = update.usage or self.usage
        self.num_tokens += len(update.tokens)
        self.infos += update.tokens
        self.scores += update.prompt
        self.tokens += [info.token for info in update.tokens]
        self.reason, self.stopped_by = update.finish_reason, update.stopped_by


class Completions:
    """The answer to some prompts."""

    def __init__(
        self,
        face: Face,
        model: Model,
        prompts: list[list[int]],
        body: CompletionRequest,
        requests: Sequence[Request],
        id_: str,
    ) -> None:
        self.face, self.model, self.prompts, self.body, self.requests = face, model, prompts, body, requests
        self.choices = [Choice() for _ in requests]
        self.head = {"id": id_, "object": "text_completion", "created": int(time.time()), "model": model.name}

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        async with aclosing(run(self.face.link, self.face.meter, self.requests)) as updates:
            async for news in updates:
                for number, update in news:
                    self.choices[number].read(update)
        self.face.note_end()
        told = [self._told(number, choice, choice, is_first=True) for number, choice in enumerate(self.choices)]
        return self.head | {"choices": told, "usage": self._usage()}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer piece by piece, as server-sent events."""
        options = self.body.stream_options
        rest: dict[str, Any] = {"usage": None} if options is not None and options.include_usage else {}
        begun: set[int] = set()
        async with aclosing(run(self.face.link, self.face.meter, self.requests)) as updates:
            async for news in updates:
                if not news:
                    yield SIGN_OF_LIFE
                for number, update in news:
                    piece = Choice()
                    piece.read(update)
                    self.choices[number].read(update)
                    is_first = number not in begun
                    begun.add(number)
                    told = self._told(number, self.choices[number], piece, is_first=is_first)
                    yield event(self.head | {"choices": [told]} | rest)
        self.face.note_end()
        if rest:
            yield event(self.head | {"choices": [], "usage": self._usage()})
        yield DONE

    def _told(self, number: int, choice: Choice, piece: Choice, *, is_first: bool) -> dict[str, Any]:
        prompt = self.prompts[number // (self.body.n or 1)]
        echoed = self.model.tokenizer.decode(prompt[len(self.model.tokenizer.opening) :]) if self.body.echo else ""
        told: dict[str, Any] = {
            "index": number,
            "text": (echoed if is_first else "") + piece.text,
            "logprobs": None,
            "finish_reason": choice.reason,
        }
        if self.body.logprobs is not None:
            before = [TokenInfo(prompt[0], 0.0), *piece.scores] if self.body.echo and is_first else []
            told["logprobs"] = self._logprobs(choice, [*before, *piece.infos], has_start=bool(before))
        if choice.stopped_by is not None:
            told["stop_reason"] = choice.stopped_by
        if self.body.return_token_ids:
            told |= {"token_ids": piece.tokens} | ({"prompt_token_ids": prompt} if is_first else {})
        return told

    def _logprobs(self, choice: Choice, infos: Sequence[TokenInfo], *, has_start: bool) -> dict[str, Any]:
        """Return logprobs as this endpoint tells them; the first token of a prompt has none."""
        decode = self.model.tokenizer.token_bytes
        words = [decode(info.token).decode("utf-8", "replace") for info in infos]
        offsets = []
        unseen = len(self.model.tokenizer.opening) if has_start else 0  # stands before the text
        for place, info in enumerate(infos):
            offsets.append(choice.offset)
            choice.offset += len(choice.decoded(decode(info.token))) if place >= unseen else 0
        tops = [{decode(token).decode("utf-8", "replace"): value for token, value in info.top} for info in infos]
        values: list[float | None] = [max(info.logprob, -9999.0) for info in infos]
        if has_start:
            values[0] = None
        return {"tokens": words, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _usage(self) -> dict[str, Any]:
        return usage_tree(Prepared([], sum(map(len, self.prompts))), self.choices)
