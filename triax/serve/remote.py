"""A server of the OpenAI API as somebody to talk to."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from triax.errors import ConfigError
from triax.serve.converse import Message, Piece

CONNECT_S = 5.0


class Remote:
    """A server that speaks the OpenAI API, ours or another.

    Args:
        url: Where it is, with or without `/v1`.
        key: API key.

    Raises:
        ConfigError: Nobody answers there, or not in this language.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_S))
        try:
            card = self._get("/v1/models")["data"][0]
        except BaseException:
            self.close()
            raise
        self.name: str = card["id"]
        self.is_base: bool = card.get("chat_format") == "text"

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._http.get(self.url + path, timeout=CONNECT_S)
            tree = response.json()
        except httpx.HTTPError as problem:
            raise ConfigError(
                f"{self.url}: no server answers; found {str(problem) or type(problem).__name__}; "
                "start one with `triax serve CHECKPOINT`"
            ) from None
        except ValueError:
            raise ConfigError(f"{self.url}: not a server of this API; found something else; check the URL") from None
        if response.is_error:
            raise ConfigError(_words(tree, response.status_code))
        return tree

    def reply(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Iterator[Piece]:
        """Answer, piece by piece; leaving early ends the answer.

        Raises:
            ConfigError: The server refuses, or does not answer any more.
        """
        body = {"model": self.name, "messages": list(messages), "stream": True} | dict(options)
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        reason = None
        for tree in self._events("/v1/chat/completions", body):
            for choice in tree.get("choices", ()):
                delta = choice.get("delta", {})
                reason = choice.get("finish_reason") or reason
                thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
                message["content"] += text
                if thought:
                    message["reasoning_content"] = message.get("reasoning_content", "") + thought
                if any(one["kind"] == "answer_in_think" for one in choice.get("warnings", ())):
                    message.pop("reasoning_content", None)
                call = "".join(_note_call(calls, one) for one in delta.get("tool_calls") or ())
                if thought or text or call:
                    yield Piece(thought, text, call)
        if reason == "tool_calls":
            message["tool_calls"] = calls
        yield Piece(reason=reason or "stop", told=message)

    def stream(self, prompt: str, max_tokens: int, **options: Any) -> Iterator[str]:
        """Continue a text, piece by piece.

        Raises:
            ConfigError: The server refuses, or does not answer any more.
        """
        body = {"model": self.name, "prompt": prompt, "max_tokens": max_tokens, "stream": True} | options
        for tree in self._events("/v1/completions", body):
            yield from (choice["text"] for choice in tree.get("choices", ()) if choice.get("text"))

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", self.url + path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise ConfigError(_words(response.json(), response.status_code))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        tree = json.loads(line.removeprefix("data: "))
                        if "error" in tree:
                            raise ConfigError(_words(tree, response.status_code))
                        yield tree
        except httpx.HTTPError as problem:
            raise ConfigError(
                f"{self.url}: the answer broke off; found {str(problem) or type(problem).__name__}; send it again"
            ) from None


def _note_call(calls: list[dict[str, Any]], delta: Mapping[str, Any]) -> str:
    """Add a piece of a call; returns how a person reads it."""
    function = delta.get("function", {})
    words = function.get("arguments") or ""
    if delta.get("id"):
        calls.append({"id": delta["id"], "type": "function", "function": {"name": function["name"], "arguments": ""}})
        calls[-1]["function"]["arguments"] = words
        return f"\n{function['name']} {words}"
    calls[delta["index"]]["function"]["arguments"] += words
    return words


def _words(tree: Any, status: int) -> str:
    error = tree.get("error") if isinstance(tree, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else f"server: status {status}"
