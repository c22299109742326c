"""`/v1/models`, `/tokenize`, `/detokenize`: what the model is called and what it reads."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest

from triax.serve.http.face import FAULTS, Face, StrictRoute
from triax.serve.http.fault import refuse
from triax.serve.http.prompt import prepare_chat
from triax.serve.http.schema import ChatRequest, DetokenizeRequest, TokenizeRequest


def router(face: Face) -> APIRouter:
    """Return the endpoints."""
    routes = APIRouter(route_class=StrictRoute, tags=["model"])

    def card() -> dict[str, Any]:
        model = face.model
        return {
            "id": model.name,
            "object": "model",
            "created": face.started,
            "owned_by": "triax",
            "context_length": model.context,
            "vocab_size": model.tokenizer.vocab_size,
            "chat_format": model.format,
            "has_vision": model.slot_token is not None,
        }

    @routes.get("/v1/models", responses=FAULTS)
    async def list_models() -> dict[str, Any]:
        """List the one model that is served."""
        return {"object": "list", "data": [card()]}

    @routes.get("/v1/models/{name:path}", responses=FAULTS)
    async def get_model(name: str) -> dict[str, Any]:
        """Tell about a model."""
        face.check_name(name)
        return card()

    @routes.post("/tokenize", responses=FAULTS)
    async def tokenize(body: TokenizeRequest, request: HttpRequest) -> dict[str, Any]:
        """Return the tokens of a text, or of a conversation with all that stands around its words."""
        model = face.model if body.model is None else face.check_name(body.model)
        text, messages = body.text, body.messages
        if text is not None and messages is not None:
            raise refuse("text: give either text or messages; found both; send one")
        if text is not None:
            tokens = await face.prepare(request, lambda: model.tokenizer.encode(text))
            return {"tokens": tokens, "count": len(tokens), "max_model_len": model.context}
        if messages is None:
            raise refuse("text: give either text or messages; found neither; send one")
        chat = ChatRequest.model_construct(**body.model_dump(exclude={"text", "messages"}), messages=messages)
        prepared = await face.prepare(request, partial(prepare_chat, model, chat, {}))
        return {
            "tokens": prepared.tokens,
            "count": len(prepared.tokens),
            "prompt_tokens": prepared.num_billed,
            "max_model_len": model.context,
        }

    @routes.post("/detokenize", responses=FAULTS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """Return the text that tokens stand for."""
        model = face.model if body.model is None else face.check_name(body.model)
        model.check_tokens(body.tokens, "tokens")
        return {"text": model.tokenizer.decode(body.tokens)}

    return routes
