"""Chat formats: conversations to tokens and answers to messages, the same for training and serving.

`xtml.prompt` and `xtml_parser` speak K3, `k2.prompt` and `k2_parser` the K2 family.
"""

from triax.data.chat import k2, xtml
from triax.data.chat.event import (
    Arguments,
    Call,
    CallEnd,
    CallStart,
    Content,
    Event,
    Finish,
    Flag,
    ParseError,
    Promoted,
    Reasoning,
    Reply,
    collect,
)
from triax.data.chat.k2 import K2Options
from triax.data.chat.k2_parser import k2_parser
from triax.data.chat.message import Image, Message, ToolCall, read_messages
from triax.data.chat.options import Options, request_options
from triax.data.chat.parser import Parser
from triax.data.chat.segment import ChatTokenizer, Prompt, Segment, encode, spell
from triax.data.chat.tool import check_tools
from triax.data.chat.xtml_parser import xtml_parser

__all__ = [
    "Arguments",
    "Call",
    "CallEnd",
    "CallStart",
    "ChatTokenizer",
    "Content",
    "Event",
    "Finish",
    "Flag",
    "Image",
    "K2Options",
    "Message",
    "Options",
    "ParseError",
    "Parser",
    "Promoted",
    "Prompt",
    "Reasoning",
    "Reply",
    "Segment",
    "ToolCall",
    "check_tools",
    "collect",
    "encode",
    "k2",
    "k2_parser",
    "read_messages",
    "request_options",
    "spell",
    "xtml",
    "xtml_parser",
]
