"""A server of the OpenAI API as somebody to talk to."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from triax.errors import ConfigError
from triax.serve.converse import Message, Piece

CONNECT_S = 5.0
STRANGE = (LookupError, TypeError, AttributeError)
"""What reading a tree raises that is not of this API."""


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
            self.name: str = card["id"]
            self.is_base: bool = card.get("chat_format") == "text"
        except STRANGE:
            self.close()
            raise ConfigError(f"{self.url}: not a server of this API; found no model; check the URL") from None
        except BaseException:
            self.close()
            raise

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
        try:
            yield from self._reply({"model": self.name, "messages": list(messages), "stream": True} | dict(options))
        except STRANGE as problem:
            raise self._unread(problem) from None

    def _reply(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        calls: list[dict[str, Any]] = []
        reason = None
        for tree in self._events("/v1/chat/completions", body):
            for choice in tree.get("choices", ()):
                delta = choice.get("delta") or {}
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
        if reason is None:
            raise ConfigError(f"{self.url}: the answer broke off; found no end of it; send it again")
        yield Piece(reason=reason, told=message)

    def stream(self, prompt: str, max_tokens: int, **options: Any) -> Iterator[str]:
        """Continue a text, piece by piece.

        Raises:
            ConfigError: The server refuses, or does not answer any more.
        """
        body = {"model": self.name, "prompt": prompt, "max_tokens": max_tokens, "stream": True} | options
        for tree in self._events("/v1/completions", body):
            yield from (choice["text"] for choice in tree.get("choices", ()) if choice.get("text"))

    def _unread(self, found: object) -> ConfigError:
        return ConfigError(f"{self.url}: the answer is not of this API; found `{found}`; ask another server")

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream("POST", self.url + path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise ConfigError(_words(_tree(response.text), response.status_code))
                for line in response.iter_lines():
                    field, _, text = line.partition(":")
                    if field == "data" and text.strip() != "[DONE]":
                        tree = _tree(text)
                        if not isinstance(tree, dict):
                            raise self._unread(text[:80])
                        if tree.get("error"):
                            raise ConfigError(_words(tree, response.status_code))
                        yield tree
        except httpx.HTTPError as problem:
            raise ConfigError(
                f"{self.url}: the answer broke off; found {str(problem) or type(problem).__name__}; send it again"
            ) from None


def _tree(text: str) -> Any:
    """Return a text as JSON; None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


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
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return f"server: found status {status}" + (f" and `{str(error)[:200]}`" if error else "")
