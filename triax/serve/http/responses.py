"""`/v1/responses`, the part that needs no memory on the server: every request brings its whole conversation."""

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import ValidationError
from starlette.responses import Response

from triax.data.chat import Event
from triax.serve.http.answer import Turn, unless_gone, usage_tree
from triax.serve.http.chat import Chat
from triax.serve.http.face import SIGN_OF_LIFE, STREAMED, Face, StrictRoute, dumps
from triax.serve.http.fault import refuse
from triax.serve.http.model import Model
from triax.serve.http.output import Output
from triax.serve.http.prompt import Prepared, check_fixed, prepare_chat, requests_of
from triax.serve.http.schema import ChatRequest, Message
from triax.serve.http.schema_responses import Item, ResponsesRequest, parts_of
from triax.serve.request import Request


def router(face: Face) -> APIRouter:
    """Return the endpoint."""
    routes = APIRouter(route_class=StrictRoute, tags=["generate"])

    @routes.post("/v1/responses", responses=STREAMED)
    async def responses(body: ResponsesRequest, request: HttpRequest) -> Response:
        """Answer a conversation, as items."""
        model = face.admit(body.model)
        chat = as_chat(body)
        prepared = await face.prepare(request, partial(prepare_chat, model, chat, {}))
        if face.settings.http.has_fixed_sampling:
            check_fixed(model, body, thinking=prepared.thinking)
        id_ = f"resp_{uuid4().hex}"
        deadline_s = face.settings.http.deadline_s
        requests = requests_of(
            model,
            prepared,
            body,
            id_,
            body.max_output_tokens,
            deadline_s=deadline_s,
            top_logprobs=(body.top_logprobs or 0) if chat.logprobs else None,
        )
        answer = Responses(face, model, prepared, chat, requests, id_, body)
        if body.stream:
            return await face.stream(request, answer.events_of())
        return Response(dumps(await unless_gone(request, answer.response())), media_type="application/json")

    return routes


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the same conversation in the other endpoint's words."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    given = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for number, item in enumerate(given):
        _add(messages, item, f"input[{number}]")
    tools = [tool.as_chat() for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    form = None
    if body.text is not None and body.text.format is not None:
        form = {name: value for name, value in body.text.format.items() if name == "type"}
        if form.get("type") == "json_schema":
            form["json_schema"] = {name: value for name, value in body.text.format.items() if name != "type"}
    effort = body.reasoning.effort if body.reasoning is not None else None
    common = body.model_dump(include=set(ChatRequest.model_fields) & set(ResponsesRequest.model_fields) - SPECIAL)
    return ChatRequest.model_construct(
        **common,
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        response_format=form,
        reasoning_effort=effort,
        thinking=None,
        logprobs=body.top_logprobs is not None or LOGPROBS in (body.include or ()),
        stream_options=None,
    )


SPECIAL = {"tools", "tool_choice", "stream_options"}
LOGPROBS = "message.output_text.logprobs"


def _add(messages: list[Message], item: Item, where: str) -> None:
    """Add an item; what the assistant thought, said and called in one go is one message of a chat."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    kind = item.type
    if kind == "message":
        if item.role is None or item.content is None:
            raise refuse(f"{where}: a message needs role and content; found one without; give both")
        parts = parts_of(item.content)
        if item.role == "assistant" and last is not None and last.content is None and not last.tool_calls:
            last.content = parts
        else:
            messages.append(Message(role=item.role, content=parts))
    elif kind == "reasoning":
        messages.append(Message(role="assistant", reasoning_content=item.thoughts()))
    elif kind == "function_call":
        if not item.name or not item.call_id:
            raise refuse(f"{where}: a call needs name and call_id; found one without; give both")
        if last is None:
            last = Message(role="assistant")
            messages.append(last)
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        try:
            whole = Message.model_validate({"role": "assistant", "tool_calls": [call]})
        except ValidationError:
            raise refuse(f"{where}.name: is too long; found {len(item.name)} characters; send the call's own") from None
        last.tool_calls = [*(last.tool_calls or ()), *(whole.tool_calls or ())]
    else:
        if not item.call_id:
            raise refuse(f"{where}.call_id: is missing; found a call's output without it; give the id of its call")
        if item.output is None:
            raise refuse(f"{where}.output: is missing; found a call's output without it; give text or parts")
        messages.append(Message(role="tool", tool_call_id=item.call_id, content=parts_of(item.output)))


class Responses(Chat):
    """One answer, told as items."""

    def __init__(
        self,
        face: Face,
        model: Model,
        prepared: Prepared,
        body: ChatRequest,
        requests: Sequence[Request],
        id_: str,
        asked: ResponsesRequest,
    ) -> None:
        super().__init__(face, model, prepared, body, requests, id_)
        self.asked, self.request = asked, requests[0]
        self.output = Output(with_logprobs=bool(self.body.logprobs))
        self.number = 0

    async def response(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        async for _ in self._read():
            pass
        return self._tree(self._status())

    async def events_of(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as the server-sent events of this endpoint."""
        has_begun = False
        async for told in self._read():
            if not has_begun:
                has_begun = True
                for kind in ("response.created", "response.in_progress"):
                    yield self._event({"type": kind, "response": self._tree("in_progress")})
            if told is None:
                yield SIGN_OF_LIFE
                continue
            for one in told:
                yield self._event(one)
            if not told:
                yield b""
        status = self._status()
        yield self._event({"type": f"response.{status}", "response": self._tree(status)})

    async def _read(self) -> AsyncGenerator[list[dict[str, Any]] | None, None]:
        async for news in self.events():
            if news is None:
                yield None
                continue
            events: list[Event] = news[1]
            logprobs = self.turns[0].take_logprobs() if self.body.logprobs else []
            yield self.output.read(events, logprobs)

    def _event(self, tree: dict[str, Any]) -> bytes:
        kind: str = tree["type"]
        told = {"type": kind, "sequence_number": self.number} | tree
        self.number += 1
        return b"event: " + kind.encode() + b"\ndata: " + dumps(told) + b"\n\n"

    def _status(self) -> str:
        return "completed" if self.turns[0].reason in ("stop", "tool_calls") else "incomplete"

    def _tree(self, status: str) -> dict[str, Any]:
        asked, turn = self.asked, self.turns[0]
        why = "max_output_tokens" if turn.reason == "length" else turn.reason
        text = asked.text.model_dump() if asked.text is not None else None
        return {
            "id": self.head["id"],
            "object": "response",
            "created_at": self.head["created"],
            "model": self.head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": why} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "output": [] if status == "in_progress" else self.output.items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "store": False,
            "temperature": self.request.sampling.temperature,
            "text": text if text and text.get("format") else {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_p": self.request.sampling.top_p,
            "truncation": "disabled",
            "metadata": asked.metadata or {},
            "usage": None if status == "in_progress" else self._usage(turn),
        } | ({"warnings": turn.warnings} if turn.warnings else {})

    def _usage(self, turn: Turn) -> dict[str, Any]:
        usage = usage_tree(self.prepared, [turn])
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
