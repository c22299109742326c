"""`/v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from triax.data.chat import Arguments, CallStart, Content, Event, Promoted, Reasoning
from triax.serve.http.answer import Turn, Whole, run, unless_gone, usage_tree
from triax.serve.http.face import DONE, SIGN_OF_LIFE, STREAMED, Face, StrictRoute, dumps, event
from triax.serve.http.fault import refuse
from triax.serve.http.model import Model
from triax.serve.http.prompt import Prepared, check_fixed, prepare_chat, requests_of
from triax.serve.http.schema import ChatRequest
from triax.serve.request import Request


def router(face: Face) -> APIRouter:
    """Return the endpoint."""
    routes = APIRouter(route_class=StrictRoute, tags=["generate"])

    @routes.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(body: ChatRequest, request: HttpRequest) -> Response:
        """Answer a conversation."""
        model = face.admit(body.model, body.n or 1)
        if body.top_logprobs is not None and not body.logprobs:
            raise refuse("top_logprobs: needs logprobs; found it alone; send logprobs true")
        extra = {"enable_thinking": body.enable_thinking, "chat_template_kwargs": body.chat_template_kwargs}
        prepared = await face.prepare(request, partial(prepare_chat, model, body, extra))
        if face.settings.http.has_fixed_sampling:
            check_fixed(model, body, thinking=prepared.thinking)
        id_ = f"chatcmpl-{uuid4().hex}"
        requests = requests_of(
            model,
            prepared,
            body,
            id_,
            body.max_completion_tokens or body.max_tokens,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            deadline_s=face.settings.http.deadline_s,
        )
        answer = Chat(face, model, prepared, body, requests, id_)
        if body.stream:
            return await face.stream(request, answer.chunks())
        return Response(dumps(await unless_gone(request, answer.whole())), media_type="application/json")

    return routes


class Chat:
    """One answer of one or more choices."""

    def __init__(
        self,
        face: Face,
        model: Model,
        prepared: Prepared,
        body: ChatRequest,
        requests: Sequence[Request],
        id_: str,
    ) -> None:
        self.face, self.body, self.prepared, self.requests = face, body, prepared, requests
        self.turns = [Turn(model, prepared, body.stop or ()) for _ in requests]
        self.head = {"id": id_, "created": int(time.time()), "model": model.name}

    async def events(self) -> AsyncGenerator[tuple[int, list[Event]] | None, None]:
        """Yield numbers of choices with their events; None is a sign of life."""
        async with aclosing(run(self.face.link, self.face.meter, self.requests)) as updates:
            async for news in updates:
                if not news:
                    yield None
                for number, update in news:
                    turn = self.turns[number]
                    was_over = turn.reason is not None
                    events = turn.read(update)
                    if turn.reason is not None and not was_over and update.finish_reason is None:
                        self.face.link.abort(update.id)  # a stop string ends one choice, whatever the others do
                    yield number, events
                if all(turn.reason is not None for turn in self.turns):
                    break
        self.face.note_end()

    async def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        messages = [Whole() for _ in self.turns]
        async with aclosing(self.events()) as events:
            async for news in events:
                if news is not None:
                    for one in news[1]:
                        messages[news[0]].add(one)
        tree = self.head | {
            "object": "chat.completion",
            "choices": [self._choice(number, message) for number, message in enumerate(messages)],
            "usage": usage_tree(self.prepared, self.turns),
            "system_fingerprint": self._fingerprint(),
        }
        return tree | ({"prompt_token_ids": self.prepared.tokens} if self.body.return_token_ids else {})

    def _choice(self, number: int, message: Whole) -> dict[str, Any]:
        turn = self.turns[number]
        choice = {
            "index": number,
            "message": message.message(turn.reason),
            "logprobs": {"content": turn.take_logprobs(), "refusal": None} if self.body.logprobs else None,
            "finish_reason": turn.reason,
        }
        return choice | self._extras(turn, turn.tokens)

    def _extras(self, turn: Turn, tokens: list[int]) -> dict[str, Any]:
        extras: dict[str, Any] = {"warnings": turn.warnings} if turn.reason is not None and turn.warnings else {}
        return extras | ({"token_ids": tokens} if self.body.return_token_ids else {})

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer piece by piece, as server-sent events."""
        head = self.head | {"object": "chat.completion.chunk", "system_fingerprint": self._fingerprint()}
        has_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        rest = {"usage": None} if has_usage else {}
        begun: set[int] = set()
        sent = [0] * len(self.turns)
        async with aclosing(self.events()) as events:
            async for news in events:
                if news is None:
                    yield SIGN_OF_LIFE
                    continue
                number, turn = news[0], self.turns[news[0]]
                deltas = [delta for one in news[1] if (delta := delta_of(one)) is not None]
                is_over = turn.reason is not None
                if number not in begun:
                    begun.add(number)
                    deltas = [{"role": "assistant", "content": ""} | (deltas[0] if deltas else {}), *deltas[1:]]
                if is_over or (self.body.return_token_ids and not deltas and len(turn.tokens) > sent[number]):
                    deltas.append({})
                for place, delta in enumerate(deltas):
                    choice: dict[str, Any] = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
                    if place == 0 and self.body.logprobs:
                        choice["logprobs"] = {"content": turn.take_logprobs(), "refusal": None}
                    if place == len(deltas) - 1:
                        choice["finish_reason"] = turn.reason
                        if turn.reason is not None:  # clients of the model's vendor read it here, asked for or not
                            choice["usage"] = usage_tree(self.prepared, [turn])
                        choice |= self._extras(turn, turn.tokens[sent[number] :])
                        sent[number] = len(turn.tokens)
                    yield event(head | {"choices": [choice]} | rest)
                if not deltas:
                    yield b""
        if has_usage:
            yield event(head | {"choices": [], "usage": usage_tree(self.prepared, self.turns)})
        yield DONE

    def _fingerprint(self) -> str:
        facts = self.face.link.facts
        return f"triax-{facts.weight_version if facts else 0}"


def delta_of(one: Event) -> dict[str, Any] | None:
    """Return what an event adds to a message; None for what is no part of it."""
    match one:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text) | Promoted(text):
            return {"content": text}
        case CallStart(index, id_, name):
            call = {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None
