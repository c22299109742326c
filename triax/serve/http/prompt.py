"""From a checked body to what the engine gets: tokens, pictures, borders, form, sampling."""

import base64
import binascii
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from triax.data import chat
from triax.data.chat.parser import Parser
from triax.data.chat.tool import check_tools, tool_name
from triax.data.kimi import KimiTokenizer
from triax.serve.answer_grammar import SchemaError, Vocabulary, check_call, check_form
from triax.serve.http.fault import refuse
from triax.serve.http.model import Model
from triax.serve.http.schema import ChatRequest, Common, ImageUrl, Message
from triax.serve.http.schema_size import check_size
from triax.serve.request import MediaItem, Request, Sampling, Structure

MAX_IMAGES = 64
KWARGS = ("thinking", "enable_thinking", "preserve_thinking", "thinking_effort", "reasoning_effort")
SYNONYMS = {"enable_thinking": "thinking", "reasoning_effort": "thinking_effort"}
ENDS = {"k3": chat.xtml.END, "k2": chat.k2.END}


@dataclass(frozen=True)
class Prepared:
    """A prompt, ready for the engine."""

    tokens: list[int]
    num_billed: int
    """Tokens to report as the prompt's."""
    thinking: bool = False
    media: tuple[MediaItem, ...] = ()
    borders: tuple[int, ...] = ()
    structure: Structure | None = None
    parser: Callable[[], Parser] | None = None
    """Makes a parser for one answer; None where text stays text."""
    max_calls: int | None = None
    """Most calls that an answer may have; None does not bound them."""


def prepare_chat(model: Model, fields: ChatRequest, extra: Mapping[str, Any]) -> Prepared:
    """Render a conversation.

    Args:
        model: Whose format is spoken.
        fields: The body.
        extra: `enable_thinking` and `chat_template_kwargs` of the body, where it has them.

    Raises:
        DataError: A message or an option cannot be rendered.
        Fault: The same, for what only requests can have.
    """
    if not isinstance(model.tokenizer, KimiTokenizer) or model.format == "text":
        raise refuse("messages: this model has no chat format; found a base model; use /v1/completions")
    check_messages(fields.messages)
    declared = check_declarations(fields)
    tools = list(declared.values())
    check_format(fields.response_format)
    wish = {
        "thinking": fields.thinking,
        "enable_thinking": extra.get("enable_thinking"),
        "reasoning_effort": fields.reasoning_effort,
        "tools": fields.tools,
        "tool_choice": fields.tool_choice if model.format == "k3" or isinstance(fields.tool_choice, str) else None,
        "response_format": fields.response_format,
    }
    wish |= _template_wish(extra.get("chat_template_kwargs"), wish)
    options = chat.request_options(wish, keeps=("all",) if model.format == "k3" else ("last", "all"))
    if not model.thinks:
        options = replace(options, thinking=False, effort=None)
    if options.tool_choice == "required" and not tools:
        raise refuse("tool_choice: there is nothing to call; found `required` without tools; declare tools")
    messages = [message.model_dump(exclude_none=True) for message in fields.messages]
    whole = [message for message in fields.messages if not message.partial]
    pictures = read_pictures(model, fields.messages)
    images = [chat.Image(picture.width, picture.height, picture.num_tokens) for picture in pictures]
    num_calls = sum(len(message.tool_calls or ()) for message in fields.messages)
    tokenizer = model.tokenizer
    num_notes = 0
    begun = fields.messages[-1] if fields.messages[-1].partial else None
    is_held = (options.response_format or {}).get("type", "text") != "text" or isinstance(fields.tool_choice, Mapping)
    if begun is not None and (is_held or options.tool_choice == "required"):
        raise refuse(
            "messages: a begun answer cannot be held to a form; found `partial` with response_format or a forced call; "
            "leave one out"
        )
    has_begun_thinking = begun is not None and not begun.content and bool(begun.reasoning_content or begun.reasoning)
    # whether the model goes on inside its thinking, or may begin with it
    is_thinking = options.thinking and not (begun is not None and begun.content)
    is_opened = is_thinking
    if model.format == "k3":
        num_notes = (options.tool_choice != "auto") + ((options.response_format or {}).get("type", "text") != "text")
        prompt = chat.xtml.prompt(tokenizer, messages, options, images)

        def parser() -> Parser:
            return chat.xtml_parser(tokenizer, thinking=is_thinking, num_calls=num_calls)
    else:
        opened = options.thinking and model.slot_token is not None  # K2.5 opens thinking in the prompt, K2 does not
        told = chat.K2Options(options.tools, options.thinking, options.keep, opened)
        prompt = chat.k2.prompt(tokenizer, messages, told, images)
        is_opened = is_thinking and (opened or has_begun_thinking)

        def parser() -> Parser:
            return chat.k2_parser(tokenizer, tools=options.tools, open_think=is_opened, num_calls=num_calls)

    return Prepared(
        prompt.ids,
        prompt.num_billed,
        options.thinking,
        media_of([pictures[number] for number in prompt.pictures], prompt.ids, model.slot_token),
        borders_of(prompt.ids, tokenizer.control[ENDS[model.format]], whole, num_notes),
        structure_of(model, replace(options, thinking=is_thinking), declared, fields, is_opened=is_opened),
        parser,
        0 if options.tool_choice == "none" or not tools else 1 if fields.parallel_tool_calls is False else None,
    )


def _template_wish(given: object, wish: Mapping[str, Any]) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or (strange := sorted(set(given) - set(KWARGS))):
        found = strange if isinstance(given, Mapping) else given
        raise refuse(f"chat_template_kwargs: not known; found `{found}`; use {', '.join(KWARGS)}")
    for name in ("enable_thinking", "preserve_thinking"):
        if not isinstance(given.get(name), bool | None):
            raise refuse(f"chat_template_kwargs.{name}: must be true or false; found `{given[name]!r}`; correct it")
    said = {name for name in KWARGS if wish.get(name) is not None}  # the body's own fields go before the template's
    said |= {other for name, other in SYNONYMS.items() if name in said}
    return {name: value for name, value in given.items() if name not in said}


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse what a message of its role cannot have."""
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role == "tool" and not message.tool_call_id:
            raise refuse(f"{where}.tool_call_id: is missing; found a tool result without it; give the id of its call")
        if message.tools is not None and message.role not in ("system", "developer"):
            raise refuse(
                f"{where}.tools: only a system message adds tools; found role `{message.role}`; move them there"
            )
        if message.tools and message.content:
            raise refuse(f"{where}: a system message has content or tools; found both; send two messages")
        if message.partial:
            if message.role != "assistant" or number != len(messages) - 1:
                raise refuse(
                    f"{where}.partial: only the last message can be continued, and only an assistant's; found role "
                    f"`{message.role}` at place {number} of {len(messages)}; leave it out"
                )
            if message.tool_calls:
                raise refuse(f"{where}.tool_calls: a begun answer has text alone; found calls; leave one out")
        if message.role in ("system", "developer", "user") and message.content is None and not message.tools:
            raise refuse(f"{where}.content: is missing; found none; give text")


def check_declarations(fields: ChatRequest) -> dict[str, Mapping[str, Any]]:
    """Return all declared tools by their place, global and added; refuse incomplete ones and doubles."""
    tools: dict[str, Mapping[str, Any]] = {}
    seen: dict[str, str] = {}
    lists = [("tools", fields.tools)]
    lists += [(f"messages[{number}].tools", message.tools) for number, message in enumerate(fields.messages)]
    for where, declared in lists:
        for number, tool in enumerate(declared or ()):
            if "type" not in tool:
                raise refuse(f'{where}[{number}].type: is missing; found none; give "function"')
            function = tool.get("function")
            if where != "tools" and isinstance(function, Mapping) and "parameters" not in function:
                raise refuse(
                    f"{where}[{number}].function.parameters: is missing; found none; give the schema of an object"
                )
        for number, tool in enumerate(check_tools(declared, where)):
            name = tool_name(tool)
            if name in seen:
                raise refuse(
                    f"{where}[{number}].function.name: declared twice; found `{name}` also in {seen[name]}; rename one"
                )
            seen[name] = f"{where}[{number}]"
            tools[seen[name]] = tool
    return tools


def check_format(form: Mapping[str, Any] | None) -> None:
    """Refuse a `response_format` that says too little."""
    if form is None or form.get("type") != "json_schema":
        return
    where = "response_format.json_schema"
    wrapper = form.get("json_schema")
    if not isinstance(wrapper, Mapping):
        raise refuse(f"{where}: must be an object; found `{wrapper!r}`; give name and schema")
    if not isinstance(name := wrapper.get("name"), str) or not name or not name.isprintable():
        raise refuse(f"{where}.name: is missing; found `{wrapper.get('name')!r}`; name the schema")
    if not isinstance(wrapper.get("schema"), Mapping):
        raise refuse(f"{where}.schema: must be an object; found `{wrapper.get('schema')!r}`; give a JSON schema")
    if not isinstance(wrapper.get("strict", False), bool | None):
        raise refuse(f"{where}.strict: must be true or false; found `{wrapper['strict']!r}`; correct it")


def structure_of(
    model: Model,
    options: chat.Options,
    declared: Mapping[str, Mapping[str, Any]],
    fields: ChatRequest,
    *,
    is_opened: bool,
) -> Structure | None:
    """Return the form that the engine must hold the answer to.

    Args:
        model: Whose format is spoken.
        options: What was asked for.
        declared: Tools by their place in the request.
        fields: The body.
        is_opened: Whether the prompt ends inside thinking.

    Raises:
        Fault: A schema cannot be held to; a tool is not declared.
    """
    tokenizer = model.tokenizer
    assert isinstance(tokenizer, KimiTokenizer)
    vocabulary = Vocabulary(tokenizer.control)
    choice = fields.tool_choice
    named = choice.get("function", {}).get("name") if isinstance(choice, Mapping) else None
    if isinstance(choice, Mapping):
        declared = {where: tool for where, tool in declared.items() if tool_name(tool) == named}
        if not declared:
            raise refuse(f"tool_choice: names no declared tool; found `{named!r}`; name one of tools")
    form = (options.response_format or {}).get("type", "text")
    must_call = options.tool_choice == "required" or named is not None
    can_call = bool(declared) and options.tool_choice != "none"
    is_strict = can_call and any(tool["function"].get("strict") for tool in declared.values())
    is_single = fields.parallel_tool_calls is False
    if not (must_call or form != "text" or is_strict):
        return None
    thinking = "open" if is_opened else "may" if options.thinking and model.format == "k2" else ""
    is_free = not must_call and form == "text"
    try:
        for where, tool in declared.items() if can_call else ():
            if not is_free or tool["function"].get("strict"):
                check_size(tool["function"].get("parameters") or {}, f"{where}.function.parameters")
                check_call(tool["function"].get("parameters") or {}, vocabulary, f"{where}.function.parameters")
        if form == "json_schema" and not must_call:
            check_size(options.schema or {}, "response_format.json_schema.schema")
            check_form(options.schema, "response_format.json_schema.schema")
    except SchemaError as problem:
        raise refuse(str(problem), problem.param) from None
    tools = json.dumps(list(declared.values()), ensure_ascii=False) if can_call else ""
    if must_call or is_free:
        return Structure("tools" if must_call else "auto", tools, thinking, is_single=is_single)
    if form == "json_object":
        return Structure("json_object", "", thinking, tools, is_single)
    return Structure("json_schema", json.dumps(options.schema, ensure_ascii=False), thinking, tools, is_single)


def read_pictures(model: Model, messages: Sequence[Message]) -> list[Any]:
    """Decode the pictures of a conversation, in order: each a `data.image.Picture`.

    Raises:
        Fault: The model does not see, an address is no data URL, or there are too many.
        DataError: One cannot be decoded.
    """
    pictures: list[Any] = []
    for number, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "image_url":
                continue
            where = f"messages[{number}].content[{place}].image_url"
            if model.slot_token is None:
                raise refuse(f"{where}: this model does not see; found a picture; send text only")
            if len(pictures) == MAX_IMAGES:
                raise refuse(f"{where}: too many pictures; found more than {MAX_IMAGES}; send fewer")
            url = part.image_url.url if isinstance(part.image_url, ImageUrl) else part.image_url
            from triax.data.image import read_image  # brings torch, which only a model that sees needs here

            pictures.append(read_image(_bytes_of(url, where), model.images, where))
    return pictures


def _bytes_of(url: str | None, where: str) -> bytes:
    head, comma, data = (url or "").partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        found = f"`{(url or '')[:40]}`"
        raise refuse(f"{where}: only data URLs are read; found {found}; send `data:image/png;base64,…`")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as problem:
        raise refuse(f"{where}: not base64; found a problem: {problem}; encode the file again") from None


def media_of(pictures: Sequence[Any], tokens: list[int], slot: int | None) -> tuple[MediaItem, ...]:
    """Return the pictures, given in the order of their slots, with their places among the tokens."""
    items: list[MediaItem] = []
    start = 0
    for picture in pictures:
        assert slot is not None
        start = tokens.index(slot, start)
        pixels = picture.patches.contiguous().numpy().tobytes()
        digest = sha256(repr(picture.grid).encode() + pixels).hexdigest()
        items.append(MediaItem(digest, start, picture.num_tokens, pixels, picture.grid))
        start += picture.num_tokens
    return tuple(items)


def borders_of(tokens: list[int], end: int, messages: Sequence[Message], num_notes: int) -> tuple[int, ...]:
    """Return where a later conversation is likely to part from this one.

    These are the end of what the system says at first, and the ends of the last two messages; the notes behind them
    hold for one answer only.
    """
    ends = [number + 1 for number, token in enumerate(tokens) if token == end]
    ends = ends[: len(ends) - num_notes]
    leading = next((n for n, message in enumerate(messages) if message.role not in ("system", "developer")), 0)
    first = ends[-(len(messages) - leading) - 1 :][:1]
    return tuple(sorted({*first, *ends[-2:]}))


def requests_of(
    model: Model, prepared: Prepared, body: Common, id_: str, max_tokens: int | None, **more: Any
) -> list[Request]:
    """Return a request for the engine for each wanted choice.

    Raises:
        Fault: The prompt does not fit, or an option is wrong.
    """
    room = model.context - len(prepared.tokens)
    if room < (1 if max_tokens != 0 else 0):
        raise refuse(
            f"prompt: does not fit; found {len(prepared.tokens)} tokens where the model takes {model.context} with the "
            "answer; shorten it",
            code="context_length_exceeded",
        )
    temperature, top_p = model.sampling(thinking=prepared.thinking)
    sampling = Sampling(
        temperature=temperature if body.temperature is None else body.temperature,
        top_k=body.top_k or 0,
        top_p=top_p if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        bias=_bias(model, body.logit_bias or {}),
    )
    seed = secrets.randbits(64) if body.seed is None else body.seed
    return [
        Request(
            id=f"{id_}.{number}",
            tokens=tuple(prepared.tokens),
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            sampling=sampling,
            seed=(seed + number) % 2**64,
            ignore_ends=body.ignore_eos,
            structure=prepared.structure,
            media=prepared.media,
            borders=prepared.borders,
            priority=body.priority,
            cache_salt=body.cache_salt,
            **more,
        )
        for number in range(body.n or 1)
    ]


def _bias(model: Model, given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for word in given:
        if not word.isascii() or not word.isdigit() or len(word) > 10 or int(word) >= model.tokenizer.vocab_size:
            raise refuse(f"logit_bias: not a token; found `{word[:40]}`; give tokens as numbers", "logit_bias")
    return tuple((int(word), float(value)) for word, value in given.items())


def check_fixed(model: Model, body: Common, *, thinking: bool) -> None:
    """Refuse sampling options other than the model's own; a temperature up to 1 is the client's choice.

    Source: the parameter checks of Moonshot's vendor verifier.
    """
    temperature, top_p = model.sampling(thinking=thinking)
    own = {
        "temperature": temperature,
        "top_p": top_p,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "n": 1,
        "top_k": 0,
        "min_p": 0,
    }
    for name, value in own.items():
        found = getattr(body, name)
        if found is not None and found != value and not (name == "temperature" and found <= 1):
            raise refuse(
                f"{name}: this server keeps the model's own sampling; found `{found:g}`; leave it out or send {value:g}"
            )
    if body.logit_bias:
        raise refuse("logit_bias: this server keeps the model's own sampling; found a bias; leave it out")
