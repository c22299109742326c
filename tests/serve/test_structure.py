"""Grammars: what a model may write, in its own format, once it has stopped thinking."""

import json

import pytest
import torch

from triax.data import chat
from triax.data.chat import k2, xtml
from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import ConfigError
from triax.serve.request import Structure
from triax.serve.structure import Guides

from .writer import accepts, write

TEXT = ['{"city": "Paris", "days": 3, "x": [1, 2.5, true, null]} weather forecast functions.get_weather:0 ' * 20]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 8},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["city", "unit"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture(scope="module")
def k3():
    return KimiTokenizer.train(TEXT, 300, "k3")


@pytest.fixture(scope="module")
def moon():
    return KimiTokenizer.train(TEXT, 300, "k2")


@pytest.fixture(scope="module")
def plain():
    return Tokenizer.train(TEXT, 290)


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_is_one_that_the_parser_of_k3_reads(k3, seed):
    after = (k3.control[xtml.CLOSE], *k3.encode("think"), k3.control[xtml.SEP])
    guide = Guides(k3).guide(Structure("tools", json.dumps(TOOLS), "open"))
    guide.push([*k3.encode("some thoughts"), *after])
    written = write(guide, k3, seed)
    assert written is not None, "strings are bounded, so it ends"
    reply = chat.xtml_parser(k3).parse([*after, *written, k3.control[xtml.END]], "stop")
    assert reply.calls
    for call in reply.calls:
        arguments = json.loads(call.arguments)
        if call.name == "weather":
            assert set(arguments) >= {"city", "unit"}
            assert arguments["unit"] in ("C", "F")
            assert len(arguments["city"]) <= 8
            assert 1 <= arguments.get("days", 1) <= 9


def test_a_control_token_cannot_be_spelled_by_text(k3):
    guide = Guides(k3).guide(Structure("tools", json.dumps(TOOLS)))
    (allowed,) = guide.allowed()
    assert allowed.nonzero().squeeze(-1).tolist() == [k3.control[xtml.CLOSE]], "the response closes before the call"


@pytest.mark.parametrize("seed", range(3))
def test_a_forced_call_of_k2_has_arguments_that_fit(moon, seed):
    guide = Guides(moon).guide(Structure("tools", json.dumps(TOOLS[:1])))
    written = write(guide, moon, seed)
    assert written is not None
    assert written[0] == moon.control[k2.SECTION_BEGIN]
    assert written[-1] == moon.control[k2.SECTION_END]
    text = moon.decode(written)
    arguments = json.loads(text.split(k2.CALL_ARGUMENTS)[1].split(k2.CALL_END)[0])
    assert arguments["unit"] in ("C", "F")


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("family", ["plain", "k3"])
def test_json_of_a_schema_fits_it_and_has_no_blanks(request, family):
    tokenizer = request.getfixturevalue(family)
    guide = Guides(tokenizer).guide(Structure("json_schema", json.dumps(SCHEMA)))
    written = write(guide, tokenizer, 1)
    text = tokenizer.decode(written)
    body = text.split(xtml.CLOSE)[0]
    value = json.loads(body)
    assert isinstance(value["a"], int)
    assert value["b"] in ("x", "y")
    assert " " not in body
    if family == "k3":
        assert text.endswith(f"{xtml.CLOSE}response{xtml.SEP}{xtml.CLOSE}message{xtml.SEP}")


@pytest.mark.parametrize("thinks", [True, False])
def test_where_tools_may_be_called_an_answer_is_of_the_form_or_a_call(k3, thinks):
    after = (k3.control[xtml.CLOSE], *k3.encode("think"), k3.control[xtml.SEP]) if thinks else ()
    structure = Structure("json_schema", json.dumps(SCHEMA), "open" if thinks else "", json.dumps(TOOLS))
    guides, seen = Guides(k3), set()
    for seed in range(8):
        guide = guides.guide(structure)
        guide.push(after)
        written = write(guide, k3, seed)
        reply = chat.xtml_parser(k3, thinking=thinks).parse([*after, *written, k3.control[xtml.END]], "stop")
        assert not reply.reasoning
        seen.add(bool(reply.calls))
        if reply.calls:
            assert not reply.content
            assert {call.name for call in reply.calls} <= {"weather", "now"}
        else:
            assert json.loads(reply.content)["b"] in ("x", "y")
    assert seen == {True, False}


def test_k2_may_call_where_a_form_is_asked_for(moon):
    guide = Guides(moon).guide(Structure("json_object", "", "", json.dumps(TOOLS[1:])))
    (allowed,) = guide.allowed()
    assert allowed[moon.control[k2.SECTION_BEGIN]]
    assert allowed[moon.encode("{")[0]]
    assert not allowed[moon.encode("x")[0]]


def test_masks_for_drafts_are_those_of_going_on_by_them_and_leave_no_trace(plain):
    guides = Guides(plain)
    structure = Structure("grammar", 'root ::= "ab" [0-9] "."')
    tokens = [plain.encode(letter)[0] for letter in "ab7."]
    guide, other = guides.guide(structure), guides.guide(structure)
    masks = guide.allowed(tokens[:3])
    for token, mask in zip(tokens[:3], masks, strict=False):
        (expected,) = other.allowed()
        assert torch.equal(mask, expected)
        other.push([token])
    assert torch.equal(masks[3], other.allowed()[0])
    assert torch.equal(guide.allowed()[0], masks[0])
    wrong = guide.allowed([tokens[3], tokens[0]])
    assert len(wrong) == 3
    assert not wrong[0][tokens[3]]


def test_thinking_is_free_until_its_end_over_a_draft_too(k3):
    after = (k3.control[xtml.CLOSE], *k3.encode("think"), k3.control[xtml.SEP])
    guide = Guides(k3).guide(Structure("json_object", "", "open"))
    text = {token for token in range(k3.vocab_size) if token not in k3.control.values() and token not in k3.ends}
    masks = guide.allowed((*k3.encode("a"), *after))
    for mask in masks[:2]:
        assert set(mask.nonzero().squeeze(-1).tolist()) == (text - set(k3.unsaid)) | {k3.control[xtml.CLOSE]}
    assert masks[-1].nonzero().tolist() == [[k3.control[xtml.OPEN]]], "the answer is opened"
    guide.push((*k3.encode("a"), *after))
    assert torch.equal(guide.allowed()[0], masks[-1])
    guide.restart(())
    assert torch.equal(guide.allowed()[0], masks[0])


@pytest.mark.parametrize("family", ["k3", "moon"])
@pytest.mark.parametrize("max_tokens", [8, 40])
def test_f43_thinking_ends_in_time_for_the_form(request, family, max_tokens):
    tokenizer = request.getfixturevalue(family)
    closer = tokenizer.control[xtml.CLOSE if family == "k3" else k2.THINK_END]
    guide = Guides(tokenizer).guide(Structure("json_object", "", "open"), max_tokens)
    budget = max_tokens * 3 // 4
    letter, half = tokenizer.encode("x"), tokenizer.encode("é")[:1]
    for _ in range(budget):
        assert guide.allowed()[0][letter[0]]
        guide.push(letter)
    assert guide.allowed()[0].nonzero().tolist() == [[closer]]
    assert [mask.sum().item() for mask in guide.allowed([closer])][:1] == [1]
    guide.restart(letter * (budget - 1))
    masks = guide.allowed([*letter, closer])
    assert masks[0][letter[0]]
    assert masks[1].nonzero().tolist() == [[closer]], "drafts count too"
    guide.restart([*letter * (budget - 1), *half])
    assert guide.allowed()[0][closer], "free text ends anywhere, within a character too"
    guide.restart([closer])
    assert not guide.allowed()[0][letter[0]]


def test_f43_no_answer_may_end_before_its_form(k3, moon):
    for tokenizer in (k3, moon):
        for thinking in ("open", "may", "") if tokenizer is moon else ("open", ""):
            for kind, text in (("json_object", ""), ("tools", json.dumps(TOOLS))):
                guide = Guides(tokenizer).guide(Structure(kind, text, thinking), 100)
                assert not guide.allowed()[0][torch.tensor(sorted(tokenizer.ends))].any()


def test_f41_a_k2_model_that_does_not_think_is_held_from_the_first_token(moon):
    guides = Guides(moon)
    structure = Structure("json_schema", json.dumps({"const": 7}), "may")
    assert accepts(guides, moon, structure, "7")
    assert accepts(guides, moon, structure, f"{k2.THINK}hm{k2.THINK_END}7")
    assert not accepts(guides, moon, structure, "hm")
    guide = guides.guide(structure, 8)
    guide.push([moon.control[k2.THINK], *moon.encode("x") * 6])
    assert guide.allowed()[0].nonzero().tolist() == [[moon.control[k2.THINK_END]]]
    plain = KimiTokenizer.train(TEXT, 300, "k2")
    plain.control = {name: token for name, token in plain.control.items() if name not in (k2.THINK, k2.THINK_END)}
    assert accepts(Guides(plain), moon, structure, "7")


STRICT = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]


def test_f42_calls_of_strict_tools_are_guided_from_their_opener_on_and_text_is_free(k3, moon):
    k3_structure, moon_structure = (Structure("auto", json.dumps(STRICT)) for _ in range(2))
    call = (
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{arguments}'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    )
    unit = '<|open|>argument key="unit" type="string"<|sep|>{}<|close|>argument<|sep|>'
    city = '<|open|>argument key="city" type="string"<|sep|>Rom<|close|>argument<|sep|>'
    guides = Guides(k3)
    for text, is_right in {
        "": True,
        "any words, { and }": True,
        "words" + call.format(name="weather", arguments=city + unit.format("C")): True,
        "words" + call.format(name="weather", arguments=city + unit.format("K")): False,
        "words" + call.format(name="weather", arguments=city): False,
        "words" + call.format(name="now", arguments=unit.format("K") * 2): True,
        "words" + call.format(name="later", arguments=""): False,
        "words<|close|>response<|sep|><|close|>message<|sep|>": True,
    }.items():
        assert accepts(guides, k3, k3_structure, text) is is_right, text
    section = f"{k2.SECTION_BEGIN}{k2.CALL_BEGIN}functions.{{}}:0{k2.CALL_ARGUMENTS}{{}}{k2.CALL_END}{k2.SECTION_END}"
    guides = Guides(moon)
    for text, is_right in {
        "": True,
        f"{k2.THINK}hm{k2.THINK_END}words": True,
        "words" + section.format("weather", '{"city":"Rom","unit":"C"}'): True,
        "words" + section.format("weather", '{"city":"Rom"}'): False,
        section.format("now", '{"a": [1, 2'): True,
        section.format("later", "{}"): False,
    }.items():
        assert accepts(guides, moon, moon_structure, text) is is_right, text


def test_a_single_call_stays_single(k3, moon):
    for tokenizer in (k3, moon):
        guides = Guides(tokenizer)
        for seed in range(4):
            for is_single in (True, False):
                structure = Structure("tools", json.dumps(TOOLS), is_single=is_single)
                written = write(guides.guide(structure), tokenizer, seed)
                opener = tokenizer.control[xtml.CLOSE if tokenizer is k3 else k2.CALL_BEGIN]
                if is_single and tokenizer is moon:
                    assert written.count(opener) == 1
                elif is_single:
                    assert tokenizer.decode(written).count('call tool="') == 1


def test_strings_of_a_bounded_length_or_a_pattern_hold_no_raw_control_characters(plain):
    properties = {"a": {"type": "string", "maxLength": 4}, "b": {"type": "string", "pattern": "^[a-c]{2}$"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    for seed in range(6):
        guide = Guides(plain).guide(Structure("json_schema", json.dumps(schema)))
        value = json.loads(plain.decode(write(guide, plain, seed)))
        assert len(value["a"]) <= 4
        assert set(value["b"]) <= set("abc")


@pytest.mark.parametrize(
    "structure",
    [
        Structure("json_schema", "{"),
        Structure("json_schema", '{"type": "thing"}'),
        Structure("grammar", "root ::= ("),
        Structure("tools", "[]"),
        Structure("tools", json.dumps(TOOLS)),
    ],
)
def test_what_cannot_be_held_to_is_refused(plain, structure):
    with pytest.raises(ConfigError, match="structure"):
        Guides(plain).guide(structure)


def test_references_that_lead_to_one_type_by_many_ways_are_followed_once(k3):
    defs = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {"type": "boolean"}}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"], "$defs": defs}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    written = write(Guides(k3).guide(Structure("tools", json.dumps(tools))), k3, 0)
    call = chat.xtml_parser(k3, thinking=False).parse([*written, k3.control[xtml.END]], "stop").calls[0]
    assert json.loads(call.arguments)["a"] in (True, False)


def test_grammars_take_no_more_memory_than_they_may(plain):
    guides = Guides(plain, kept_bytes=10_000)
    structures = [
        Structure("json_schema", json.dumps({"type": "object", "properties": {"a": {"enum": [f"{n}"] * 9}}}))
        for n in range(12)
    ]
    for structure in structures:
        guides.guide(structure)
        guides.guide(structures[0])
    assert guides.knows(structures[0]), "what is used often stays"
    assert not guides.knows(structures[1])
    assert sum(size for _, size in guides._compiled.values()) < 20_000
    assert guides._compiler.get_cache_size_bytes() < 40_000
