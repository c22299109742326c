"""A model that knows nothing: it writes any token that a form allows, and a form must hold all the same."""

import json
import random
from functools import lru_cache

import torch

from triax.data import chat
from triax.data.chat import k2, xtml
from triax.serve.request import Structure


def write(guide, tokenizer, seed, limit=4000, greed=0.5):
    """Choose among allowed tokens until the answer may end; returns the tokens, None where it does not end.

    `greed` is how often the end is taken where it may be, and how often a closing bracket or quote is.
    """
    draw, written = random.Random(seed), []
    ends = sorted(tokenizer.ends)
    for step in range(limit):
        (allowed,) = guide.allowed()
        assert allowed is not None
        assert allowed.any(), f"nothing may follow {tokenizer.decode(written)!r}"
        if allowed[ends[0]] and draw.random() < greed:
            return written
        choices = allowed.nonzero().squeeze(-1).tolist()
        closing = [token for token in choices if token in closers(tokenizer)] if step > 25 else []
        if closing and draw.random() < 0.6:
            choices = closing
        token = draw.choice(choices)
        if token in ends:
            return written
        guide.push([token])
        written.append(token)
    return None


@lru_cache
def closers(tokenizer):
    """Return the tokens that close a string, an array, an object or a section."""
    control = getattr(tokenizer, "control", {})
    words = {tokenizer.token_bytes(n): n for n in range(tokenizer.vocab_size) if n not in control.values()}
    found = {words[word] for word in (b'"', b"]", b"}", b"0")} | set(tokenizer.ends)
    return found | {control[name] for name in (xtml.CLOSE, k2.CALL_END, k2.SECTION_END) if name in control}


def json_of(tokenizer, written):
    """Return the JSON of an answer."""
    text = tokenizer.decode(written) if not hasattr(tokenizer, "control") else None
    if text is None:
        stop = next((n for n, token in enumerate(written) if token in tokenizer.control.values()), len(written))
        text = b"".join(map(tokenizer.token_bytes, written[:stop])).decode()
    return json.loads(text)


def call_structure(*schemas, **more):
    """Return the form of forced calls of tools with these arguments."""
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": one}} for n, one in enumerate(schemas)]
    return Structure("tools", json.dumps(tools), **more)


def calls_of(tokenizer, written):
    """Return the calls of an answer, each with its name and arguments."""
    if xtml.OPEN in tokenizer.control:
        reply = chat.xtml_parser(tokenizer, thinking=False).parse([*written, tokenizer.control[xtml.END]], "stop")
    else:
        reply = chat.k2_parser(tokenizer).parse([*written, tokenizer.control[k2.END]], "stop")
    assert reply.finish == "tool_calls", reply
    assert not reply.errors, reply.errors
    return [(one.name, json.loads(one.arguments)) for one in reply.calls]


def accepts(guides, tokenizer, structure, text):
    """Whether a form allows a text, and that it ends there; tokens are single bytes and control tokens."""
    guide = guides.guide(structure)
    tokens = tokenizer.encode(text, allow_control=True) if hasattr(tokenizer, "control") else tokenizer.encode(text)
    for token in tokens:
        (allowed,) = guide.allowed()
        if allowed is None or not allowed[token]:
            return False
        guide.push([token])
    (allowed,) = guide.allowed()
    return bool(allowed[torch.tensor(sorted(tokenizer.ends))].any())
