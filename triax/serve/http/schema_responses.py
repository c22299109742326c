"""The body of `POST /v1/responses`, as far as it is supported."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from triax.serve.http.schema import Body, Common, Echoed, ImageUrl, Kept, Part, Tree


class Piece(Echoed):
    """A piece of a message, or of earlier thinking."""

    type: Literal["input_text", "output_text", "input_image", "reasoning_text", "summary_text", "text"]
    text: str | None = None
    image_url: str | None = None

    @model_validator(mode="after")
    def _shows_something(self) -> "Piece":
        if self.type == "input_image" and self.image_url is None:
            raise ValueError("a picture needs image_url, a data URL; nothing is stored that file_id could name")
        return self


class Item(Echoed):
    """A message, thinking, a call or its output; items of an earlier answer can be sent back as they came."""

    type: Literal["message", "reasoning", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Piece] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Piece] | None = None

    def thoughts(self) -> str:
        """Return the text of earlier thinking."""
        return "".join(piece.text or "" for piece in self.content) if isinstance(self.content, list) else ""


def parts_of(content: str | list[Piece] | None) -> str | list[Part] | None:
    """Return the content of a message, or a call's output, in the words of a chat."""
    if not isinstance(content, list):
        return content
    if all(piece.image_url is None for piece in content):
        return "".join(piece.text or "" for piece in content)
    return [
        Part(type="text", text=piece.text or "")
        if piece.image_url is None
        else Part(type="image_url", image_url=ImageUrl(url=piece.image_url))
        for piece in content
    ]


class FunctionTool(Echoed):
    """A tool; only functions are."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Tree | None = None
    strict: bool | None = None

    def as_chat(self) -> Tree:
        """Return the declaration in the words of a chat."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class TextOptions(Body):
    """The form of the answer."""

    format: Kept = None
    """`{"type": "json_schema", "name", "schema", "strict"}`, json_object or text."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Read and not used."""


class ReasoningOptions(Body):
    """How much to think."""

    effort: str | None = None
    """low, high or max; none switches thinking off."""
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Common):
    """`POST /v1/responses`; nothing is stored, so there is no earlier response to go on from."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | Tree | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    n: Literal[1] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    """Accepted; nothing is ever stored."""
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: (
        list[
            Literal[
                "message.output_text.logprobs",
                "reasoning.encrypted_content",
                "file_search_call.results",
                "web_search_call.results",
                "web_search_call.action.sources",
                "message.input_image.image_url",
                "computer_call_output.output.image_url",
                "code_interpreter_call.outputs",
            ]
        ]
        | None
    ) = None
    """Log-probabilities are told; thinking always comes in the clear, and of the rest there is nothing to tell."""
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
