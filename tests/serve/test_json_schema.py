"""Schemas: each keyword is held or refused by its name, and what a model that knows nothing writes fits."""

import json

import jsonschema
import pytest

from triax.data.kimi import KimiTokenizer
from triax.data.tokenizer import Tokenizer
from triax.errors import ConfigError
from triax.serve import json_schema
from triax.serve.json_schema import SchemaError
from triax.serve.request import Structure
from triax.serve.structure import Guides

from .random_schemas import Schemas
from .writer import accepts, call_structure, calls_of, json_of, write

TEXT = ['{"city": "Paris", "days": 3, "x": [1, 2.5, true, null]} functions.get_weather:0 année Straße 😀 漢字 ' * 20]


class Family:
    """A tokenizer with its grammars."""

    def __init__(self, name):
        self.name = name
        self.tokenizer = Tokenizer.train(TEXT, 300) if name == "plain" else KimiTokenizer.train(TEXT, 310, name)
        self.guides = Guides(self.tokenizer)

    def structure(self, schema):
        return Structure("json_schema", json.dumps(schema)) if self.name == "plain" else call_structure(schema)

    def values(self, schema, seed):
        """Return what was written: a value, the arguments of some calls, or nothing where it does not end."""
        guide = self.guides.guide(self.structure(schema))
        written = write(guide, self.tokenizer, seed, 600)
        if written is None:
            return []
        if self.name == "plain":
            return [json_of(self.tokenizer, written)]
        return [arguments for _, arguments in calls_of(self.tokenizer, written)]


@pytest.fixture(scope="module")
def families():
    return {name: Family(name) for name in ("plain", "k3", "k2")}


@pytest.fixture(scope="module")
def plain(families):
    return families["plain"]


def fits(schema, value):
    jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema).validate(value)


def takes(family, schema, value):
    """Whether a value may be written, with its keys in their order."""
    return accepts(family.guides, family.tokenizer, family.structure(schema), json_schema.literal(value))


OBJECT = {"type": "object"}
CASES = {
    "type": [({"type": ["integer", "null"]}, [7, None], ["x", 1.5, True])],
    "enum": [
        ({"enum": ["/root", "é", 1, None, [1, {"a": 2}]]}, ["/root", "é", [1, {"a": 2}]], ["/call", "è", [1]]),
        ({"enum": ["a", 7, "abc"], "type": "string", "maxLength": 2}, ["a"], [7, "abc"]),
        ({"enum": ["k", 7, 7.5, None], "type": ["integer", "string"]}, ["k", 7], [7.5, None]),
    ],
    "const": [({"const": {"a": "Straße"}}, [{"a": "Straße"}], [{"a": "Strasse"}])],
    "properties": [(OBJECT | {"properties": {"a": {"type": "integer"}}}, [{"a": 1}, {}], [{"a": "x"}])],
    "required": [
        (OBJECT | {"properties": {"b": {}}, "required": ["b", "é"]}, [{"b": 1, "é": 2}], [{"b": 1}, {}]),
    ],
    "additionalProperties": [
        (OBJECT | {"properties": {"a": {}}, "additionalProperties": False}, [{"a": 1}], [{"b": 1}]),
        (
            OBJECT | {"properties": {"a": {"const": 1}}, "additionalProperties": {"type": "boolean"}},
            [{"a": 1, "b": True, "ab": False}, {"é": True}],
            [{"b": 1}, {"a": True}],
        ),
    ],
    "patternProperties": [
        (
            OBJECT
            | {"patternProperties": {"^x-": {"type": "integer"}, "9$": {"minimum": 5}}, "additionalProperties": False},
            [{"x-a": 1, "x-9": 7}, {"b9": 6}],
            [{"x-9": 1}, {"b": 1}, {"x-a": "b"}],
        )
    ],
    "propertyNames": [
        (OBJECT | {"propertyNames": {"pattern": "^[ab]+$", "maxLength": 2}}, [{"ab": 1}], [{"c": 1}, {"aba": 1}]),
        (OBJECT | {"propertyNames": {"enum": ["é", "z"]}}, [{"é": 1}], [{"a": 1}]),
    ],
    "minProperties": [
        (OBJECT | {"properties": {"a": {}, "b": {}}, "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}]),
    ],
    "maxProperties": [(OBJECT | {"maxProperties": 1}, [{"a": 1}, {}], [{"a": 1, "b": 2}])],
    "dependentRequired": [
        (
            OBJECT | {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
            [{"b": 1}, {"a": 1, "b": 2}, {}],
            [{"a": 1}],
        )
    ],
    "dependentSchemas": [
        (
            OBJECT | {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": {"const": 3}}}}},
            [{"b": 1}, {"a": 1, "b": 3}],
            [{"a": 1, "b": 2}],
        )
    ],
    "dependencies": [
        (
            OBJECT
            | {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "properties": {"a": {}, "b": {}},
                "dependencies": {"a": ["b"]},
            },
            [{"b": 1}, {}],
            [{"a": 1}],
        )
    ],
    "items": [({"type": "array", "items": {"type": "integer"}}, [[1, 2], []], [["x"]])],
    "prefixItems": [
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False}, [[1, "b"], [1], []], [["b"]])
    ],
    "additionalItems": [
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "array",
                "items": [{"const": 1}],
                "additionalItems": {"type": "null"},
            },
            [[1, None], []],
            [[1, 2], [2]],
        )
    ],
    "minItems": [({"type": "array", "items": {"const": 1}, "minItems": 2}, [[1, 1], [1, 1, 1]], [[1], []])],
    "maxItems": [({"type": "array", "items": {"const": 1}, "maxItems": 2}, [[1, 1], []], [[1, 1, 1]])],
    "uniqueItems": [
        ({"type": "array", "items": {"enum": [1, "a", True]}, "uniqueItems": True}, [[1, True], []], [[1, 1]]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [["x"]], [["x", "y"]]),
    ],
    "contains": [
        (
            {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}, "maxItems": 3},
            [[5], [1, 5, 2]],
            [[1, 2], [], [1, 2, 3, 5]],
        )
    ],
    "minContains": [({"type": "array", "contains": {"const": 5}, "minContains": 2}, [[5, "a", 5]], [[5]])],
    "minLength": [({"type": "string", "minLength": 2}, ["éé", "a\\b"], ["é", ""])],
    "maxLength": [({"type": "string", "maxLength": 2}, ["😀😀", ""], ["abc"])],
    "pattern": [
        ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 3}, ["abc"], ["abcc", "d"]),
        ({"type": "string", "pattern": "é"}, ["née", "é"], ["nee"]),
    ],
    "format": [
        ({"type": "string", "format": "date"}, ["2024-02-28", "1999-12-31"], ["2024-02-31", "x"]),
        ({"type": "string", "format": "uuid", "pattern": "^a"}, ["a" * 8 + "-0000-0000-0000-" + "0" * 12], ["a"]),
        ({"type": "integer", "format": "int32"}, [2147483647], [2147483648]),
    ],
    "minimum": [({"type": "integer", "minimum": -3}, [-3, 0, 99], [-4]), ({"minimum": 2.5}, [2.5, "x"], [2.4])],
    "maximum": [({"type": "number", "maximum": 1.25}, [1.25, -7, 0.5], [1.26, 2])],
    "exclusiveMinimum": [({"type": "integer", "exclusiveMinimum": 3}, [4, 10], [3])],
    "exclusiveMaximum": [({"type": "number", "exclusiveMaximum": 3}, [2.9, -1], [3, 3.5])],
    "multipleOf": [
        ({"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30}, [14, 21, 28], [7, 15, 35]),
        ({"type": "integer", "multipleOf": 12}, [0, 24, -36, 1200], [6]),
        ({"type": "integer", "multipleOf": 5, "minimum": 12}, [15, 95, 100, 12345], [10, 13, 5, 101, 0, -15]),
        ({"type": "integer", "multipleOf": 3, "maximum": -7}, [-9, -12, -99, -300], [-6, -10, 9, 0]),
        ({"type": "integer", "multipleOf": 4, "minimum": -9}, [-8, -4, 0, 4, 400], [-12, 2, -3]),
        ({"type": "integer", "multipleOf": 4, "maximum": 9}, [8, 4, 0, -4, -400], [12, 2, -3]),
        ({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 1}, [0.25, 0.75], [0.3]),
    ],
    "$ref": [
        (
            OBJECT | {"properties": {"p": {"type": "integer"}, "q": {"$ref": "#/properties/p", "minimum": 5}}},
            [{"p": 1, "q": 7}],
            [{"q": 1}, {"q": "x"}],
        ),
        (OBJECT | {"properties": {"next": {"$ref": "#"}, "n": {"const": 1}}}, [{"next": {"next": {}}}], [{"next": 1}]),
        (
            {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"anyOf": [{"const": 1}, {"$ref": "#here"}]},
             "x": {"$anchor": "here", "const": "é"}}},
            [1, "é"],
            [2],
        ),
    ],
    "allOf": [
        (
            {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}, {"pattern": "^a"}]},
            ["ab", "abc"],
            ["a", "abcd", "bcd"],
        )
    ],
    "anyOf": [({"anyOf": [{"type": "integer"}, {"const": "x"}], "maximum": 9}, [9, "x"], [10, "y"])],
    "oneOf": [
        (
            {
                "oneOf": [
                    OBJECT | {"properties": {"k": {"const": "a"}, "v": {"type": "integer"}}, "required": ["k"]},
                    OBJECT | {"properties": {"k": {"const": "b"}, "w": {"type": "null"}}, "required": ["k"]},
                ]
            },
            [{"k": "a", "v": 1}, {"k": "b", "w": None}],
            [{"k": "a", "w": None}, {"k": "b", "v": 1}],
        )
    ],
    "not": [
        ({"type": "string", "not": {"enum": ["a", "é"]}}, ["b", "aa", ""], ["a", "é"]),
        ({"type": ["integer", "string"], "not": {"type": "string"}}, [3], ["x"]),
        ({"type": "integer", "not": {"const": 5}, "minimum": 4}, [4, 6, 77], [5, 3]),
        ({"type": "string", "not": {"pattern": "^a"}}, ["b", "ba"], ["a", "ab"]),
        (
            OBJECT | {"properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
            [{"a": 1}, {"b": 1}],
            [{"a": 1, "b": 1}],
        ),
    ],
    "if": [
        (
            OBJECT
            | {
                "properties": {"k": {"enum": ["é", "è"]}, "v": {"type": "integer"}},
                "required": ["k"],
                "if": {"properties": {"k": {"const": "é"}}},
                "then": {"required": ["v"]},
                "else": {"properties": {"v": {"minimum": 5}}},
            },
            [{"k": "é", "v": 1}, {"k": "è"}, {"k": "è", "v": 5}],
            [{"k": "é"}, {"k": "è", "v": 1}],
        )
    ],
}  # fmt: skip
CASES |= {"then": CASES["if"], "else": CASES["if"]}


def test_every_keyword_that_is_held_has_a_case_here():
    assert set(CASES) == set(json_schema.HELD)


@pytest.mark.parametrize("keyword", json_schema.HELD)
def test_f15_a_keyword_is_held(families, keyword):
    plain = families["plain"]
    for schema, right, wrong in CASES[keyword]:
        for value in right:
            fits(schema, value)
            assert takes(plain, schema, value), (schema, value)
        for value in wrong:
            assert not takes(plain, schema, value), (schema, value)
        for seed in range(3):
            for value in plain.values(schema, seed):
                fits(schema, value)


@pytest.mark.parametrize("keyword", json_schema.HELD)
def test_f15_f44_a_keyword_is_held_in_calls_of_k3_and_k2(families, keyword):
    """At the root where it speaks of objects, in a property, and below a reference at the root."""
    for schema, right, wrong in CASES[keyword]:
        inner = {name: value for name, value in schema.items() if name != "$schema"}
        whole = OBJECT | {"properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
        if "$ref" in json.dumps(schema):
            whole = None
        head = {"$schema": schema["$schema"]} if "$schema" in schema else {}
        shapes = [head | whole] if whole is not None else []
        if schema.get("type") == "object" or any(isinstance(value, dict) for value in right):
            shapes.append(schema)
        for name in ("k3", "k2"):
            family = families[name]
            for shape in shapes:
                for seed in range(2):
                    for value in family.values(shape, seed):
                        fits(shape, value)
            if whole is not None:
                for value in right:
                    assert call_takes(family, head | whole, value), (name, schema, value)
                for value in wrong:
                    assert not call_takes(family, head | whole, value), (name, schema, value)


def call_takes(family, schema, value):
    """Whether a call may have this value as the argument `a`."""
    text = json_schema.literal(value)
    if family.name == "k2":
        section = '<|tool_calls_section_begin|><|tool_call_begin|>functions.f0:0<|tool_call_argument_begin|>{{"a":{}}}'
        text = section.format(text) + "<|tool_call_end|><|tool_calls_section_end|>"
    else:
        kind = json_schema.type_of(value)
        text = value if kind == "string" else text
        text = (
            '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f0" index="1"<|sep|>'
            f'<|open|>argument key="a" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
            "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
        )
    return accepts(family.guides, family.tokenizer, family.structure(schema), text)


REFUSALS = {
    "maxContains": {"type": "array", "contains": {"const": 1}, "maxContains": 2},
    "unevaluatedProperties": OBJECT | {"unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$recursiveRef": {"$recursiveRef": "#"},
}


def test_every_keyword_that_is_refused_has_a_case_here():
    assert set(REFUSALS) == set(json_schema.REFUSED)


@pytest.mark.parametrize("keyword", json_schema.REFUSED)
def test_f15_a_keyword_that_cannot_be_held_is_refused_by_name(families, keyword):
    schema = OBJECT | {"properties": {"é": {"type": "array", "items": REFUSALS[keyword]}}}
    for name, root in {"plain": "structure", "k3": "tools[0].function.parameters"}.items():
        with pytest.raises(SchemaError, match=f"`{keyword}`".replace("$", r"\$")) as found:
            families[name].guides.prepare(families[name].structure(schema))
        assert found.value.param == f"{root}.properties.é.items.{keyword}"


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"type": "thing"}, ".type", "no JSON schema"),
        ({"anyOf": []}, ".anyOf", "no JSON schema"),
        ({"type": "string", "minLength": 4294967299}, ".minLength", "more than 100000"),
        ({"enum": []}, "", "no value fits"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "", "no value fits"),
        (OBJECT | {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "", "no value fits"),
        ({"$ref": "#/nowhere"}, ".$ref", "nothing is at"),
        ({"$ref": "http://x/y"}, ".$ref", "out of the schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, ".$defs.a", "lead nowhere"),
        ({"type": "string", "pattern": "(?=a)"}, ".pattern", "look around"),
        ({"type": "string", "pattern": "(a)\\1"}, ".pattern", "reference"),
        ({"type": "string", "pattern": "\\bx"}, ".pattern", "border of words"),
        ({"type": "string", "pattern": "("}, ".pattern", "no pattern"),
        ({"type": "string", "pattern": "(?i)a"}, ".pattern", "flags"),
        ({"type": "string", "pattern": "a{30000}"}, ".pattern", "too large"),
        ({"type": "string", "format": "iri"}, ".format", "iri"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, ".oneOf", "branch 0 and branch 1"),
        ({"type": "array", "uniqueItems": True}, ".uniqueItems", "at most one"),
        ({"type": "number", "multipleOf": 0.01}, ".multipleOf", "values"),
        ({"not": {"items": {"type": "null"}}}, ".not", "`items` cannot be turned round"),
        ({"if": {"contains": True}, "then": False}, ".if", "`contains`"),
        (OBJECT | {"minProperties": 3}, ".minProperties", "more than the 0 declared"),
        ({"anyOf": [{"const": 1}] * 2, "allOf": [{"anyOf": [{"minLength": n}, {"maxLength": n}]} for n in range(9)]},
         "", "combinations"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_to_is_told_with_its_place(plain, schema, place, words):
    with pytest.raises(SchemaError, match=words) as found:
        plain.guides.prepare(plain.structure(schema))
    assert found.value.param.startswith(f"structure{place}")


def test_f12_words_of_a_schema_are_no_names_of_rules(families):
    schema = OBJECT | {"properties": {"web root": {"enum": ["/root"]}}, "required": ["web root"]}
    tools = [{"type": "function", "function": {"name": "fs.root", "parameters": schema}}]
    for name in ("k3", "k2"):
        family = families[name]
        guide = family.guides.guide(Structure("tools", json.dumps(tools)))
        for called, arguments in calls_of(family.tokenizer, write(guide, family.tokenizer, 0)):
            assert (called, arguments) == ("fs.root", {"web root": "/root"})


def test_f13_accents_and_emoji_are_written_as_the_schema_has_them(families):
    words = ["Straße", "défaut", "eé1fà0é", "😀ab", "\u00e9" * 3, "\x7f\x80", "\u2028c", "\U0010ffffd", 'q"\\/']
    schema = OBJECT | {"properties": {"année1": {"enum": words}}, "required": ["année1"], "additionalProperties": False}
    for family in families.values():
        seen = {value["année1"] for seed in range(12) for value in family.values(schema, seed)}
        assert seen <= set(words)
        assert len(seen) > 2
        for word in words:
            assert takes(family, schema, {"année1": word}) if family.name == "plain" else call_words(family, word)


def call_words(family, word):
    schema = OBJECT | {"properties": {"a": {"enum": [word]}}, "required": ["a"]}
    return call_takes(family, schema, word)


@pytest.mark.parametrize("name", ["plain", "k3", "k2"])
@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 9}, {"pattern": "^[\\s\\S]*$"}])
def test_f14_strings_hold_text_and_no_control_token(families, name, schema):
    """Every mask inside of a string: no control token is in it, and its bytes can only become UTF-8."""
    family = families[name]
    tokenizer = family.tokenizer
    control = set(getattr(tokenizer, "control", {}).values()) | set(tokenizer.unsaid)
    guide = family.guides.guide(Structure("json_schema", json.dumps({"type": "string"} | schema)))
    guide.push(tokenizer.encode('"'))
    by_bytes = {tokenizer.token_bytes(n): n for n in range(tokenizer.vocab_size) if n not in control}
    for text in ("", "a", "é😀", "x\\n"):
        guide.restart(tokenizer.encode('"' + text))
        allowed = set(guide.allowed()[0].nonzero().squeeze(-1).tolist())
        assert not allowed & control
        assert by_bytes[b"\xc3"] in allowed
        for byte in (b"\x80", b"\xc0", b"\xc1", b"\xf5", b"\xff", b"\x00", b"\n"):
            assert by_bytes[byte] not in allowed, byte
    for first, wrong in (
        (b"\xe0", b"\x80"),
        (b"\xed", b"\xa0"),
        (b"\xf0", b"\x80"),
        (b"\xf4", b"\x90"),
        (b"\xc3", b"a"),
    ):
        guide.restart([*tokenizer.encode('"'), by_bytes[first]])
        assert not guide.allowed()[0][by_bytes[wrong]], (first, wrong)


def test_f16_pointers_lead_anywhere_in_forms_and_calls(families):
    named = {
        "p": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        "q": {"$ref": "#/properties/p"},
        "r": {"$ref": "#/properties/p/anyOf/1"},
        "s": {"$ref": "#"},
    }
    schema = OBJECT | {"properties": named, "required": ["q", "r"], "additionalProperties": False}
    for family in families.values():
        for seed in range(6):
            for value in family.values(schema, seed):
                fits(schema, value)


def test_a_branch_may_be_tried_before_its_own_schema_is_known(plain):
    schema = {"oneOf": [{"type": "null"}, OBJECT | {"properties": {"child": {"$ref": "#"}}, "required": ["child"]}]}
    assert takes(plain, schema, {"child": {"child": None}})


def test_names_that_nobody_declared_never_repeat_a_declared_one(plain):
    schema = OBJECT | {"properties": {"a": {"const": 1}, 'b"': {"const": 2}}, "additionalProperties": {"const": 3}}
    assert takes(plain, schema, {"a": 1, 'b"': 2, "ab": 3, 'b"c': 3})
    assert not takes(plain, schema, {"a": 3})
    assert not accepts(plain.guides, plain.tokenizer, plain.structure(schema), '{"\\u0061":3}'), "spelled otherwise"


def judge(families, numbers):
    """Write by random schemas; returns how many were accepted and how many values were written."""
    accepted = written = 0
    for number in numbers:
        family = families[("plain", "k3", "k2")[number % 3]]
        schema = Schemas(number).root(of_object=family.name != "plain")
        jsonschema.Draft202012Validator.check_schema(schema)
        try:
            family.guides.prepare(family.structure(schema))
        except SchemaError as problem:
            if "no value fits" in str(problem):
                accepted += 1  # rightly so, as the writer below would have shown
            continue
        accepted += 1
        for seed in range(2):
            for value in family.values(schema, seed):
                written += 1
                fits(schema, value)
    return accepted, written


def test_whatever_is_written_by_a_random_schema_fits_it(families):
    accepted, written = judge(families, range(60))
    assert accepted >= 57
    assert written >= 60


@pytest.mark.soak
def test_whatever_is_written_by_a_thousand_random_schemas_fits_it(families):
    accepted, written = judge(families, range(1000, 2000))
    assert accepted >= 950
    assert written >= 1000


def test_a_grammar_of_many_strings_is_made_quickly_enough_to_be_used(plain):
    named = {f"p{n}": {"type": "string", "pattern": "^[a-z0-9._-]+@[a-z0-9]+\\.[a-z]{2,3}$"} for n in range(20)}
    structure = plain.structure(OBJECT | {"properties": named})
    plain.guides.prepare(structure)
    assert plain.guides.knows(structure)


def test_a_schema_too_deep_to_be_read_is_refused_in_words(plain):
    tree = {"type": "integer"}
    for _ in range(2000):
        tree = {"not": tree}
    text = "{" + '"not":{' * 2000 + "}" * 2001
    with pytest.raises(ConfigError):
        plain.guides.prepare(Structure("json_schema", text))
