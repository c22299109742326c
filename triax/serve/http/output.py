"""The items of a response while they are written: thinking, message, calls, each opened, filled and closed."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from triax.data.chat import Arguments, CallEnd, CallStart, Content, Event, Finish, Promoted, Reasoning

Tree = dict[str, Any]


class Output:
    """Adds events up to items and tells what a stream must say about each step."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self.items: list[Tree] = []
        self._with_logprobs = with_logprobs

    def read(self, events: Sequence[Event], logprobs: list[Tree]) -> list[Tree]:
        """Take events of an answer; returns those of the stream.

        Args:
            events: What the parser found.
            logprobs: Of the answer's tokens among them.
        """
        told: list[Tree] = []
        for event in events:
            match event:
                case Reasoning(text):
                    self._text("reasoning", text, told, [])
                case Content(text):
                    self._text("message", text, told, logprobs)
                    logprobs = []
                case Promoted(text):
                    self._close(told)
                    self.items[-1]["content"] = []  # it was no thinking
                    self._text("message", text, told, logprobs)
                    logprobs = []
                case CallStart(_, id_, name):
                    item = {"type": "function_call", "id": f"fc_{uuid4().hex}", "call_id": id_, "name": name}
                    self._open(item | {"arguments": "", "status": "in_progress"}, told)
                case Arguments(_, text):
                    item = self.items[-1]
                    item["arguments"] += text
                    told.append(self._event("response.function_call_arguments.delta", delta=text))
                case CallEnd(_, valid):
                    self._close(told, "completed" if valid else "incomplete")
                case Finish(reason):
                    self._close(told, "completed" if reason != "length" else "incomplete")
        return told

    def _event(self, kind: str, **fields: Any) -> Tree:
        return {"type": kind, "output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]} | fields

    def _text(self, kind: str, text: str, told: list[Tree], logprobs: list[Tree]) -> None:
        if not (self._is_open() and self.items[-1]["type"] == kind):
            self._begin_text(kind, told)
        item = self.items[-1]
        part = item["content"][0]
        part["text"] += text
        if kind == "reasoning":
            told.append(self._event("response.reasoning_text.delta", content_index=0, delta=text))
            return
        if self._with_logprobs:
            part["logprobs"] += logprobs
        told.append(self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs))

    def _begin_text(self, kind: str, told: list[Tree]) -> None:
        if kind == "reasoning":
            item: Tree = {"type": kind, "id": f"rs_{uuid4().hex}", "summary": [], "content": []}
            part: Tree = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": kind, "id": f"msg_{uuid4().hex}", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open(item | {"status": "in_progress"}, told)
        told.append(self._event("response.content_part.added", content_index=0, part=dict(part)))
        self.items[-1]["content"].append(part)

    def _is_open(self) -> bool:
        return bool(self.items) and self.items[-1]["status"] == "in_progress"

    def _open(self, item: Tree, told: list[Tree]) -> None:
        self._close(told)
        self.items.append(item)
        shown = item | ({"content": []} if "content" in item else {})
        told.append({"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown})

    def _close(self, told: list[Tree], status: str = "completed") -> None:
        if not self._is_open():
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            told.append(self._event("response.function_call_arguments.done", name=name, arguments=arguments))
        else:
            part = item["content"][0]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more = {} if kind == "reasoning_text" else {"logprobs": part["logprobs"]}
            told.append(self._event(f"response.{kind}.done", content_index=0, text=part["text"], **more))
            told.append(self._event("response.content_part.done", content_index=0, part=dict(part)))
        index = len(self.items) - 1
        told.append({"type": "response.output_item.done", "output_index": index, "item": dict(item)})
