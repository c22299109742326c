"""Random JSON schemas of every kind that requests bring."""

import random

WORDS = ("name", "année", "web root", "😀", 'a"b', "x-1", "root", "Straße", "back\\slash", "k", "漢字", "a/b", "~t")
PATTERNS = ("^[a-c]{1,4}$", "x", "^\\d{3}-\\d{2}$", "^(ab|cd)+$", '^[^"\\\\]{2,5}$', "é.?$", "^$|^z+$", "[\\w.]+@")
FORMATS = ("date", "date-time", "time", "uuid", "ipv4", "ipv6", "email", "uri", "hostname", "duration", "own-format")


class Schemas:
    """Draws schemas.

    Args:
        seed: Of the draw.
    """

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def root(self, *, of_object=False):
        """Return a whole schema, with definitions that may lead back to it."""
        schema = self.object(3) if of_object or self.draw.random() < 0.6 else self.any(3)
        if isinstance(schema, dict):
            schema["$defs"] = {
                "leaf": self.leaf(),
                "tree": {
                    "type": "object",
                    "properties": {"v": self.leaf(), "next": {"$ref": "#/$defs/tree"}},
                    "required": ["v"],
                },
                "list é": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 3},
            }
            if self.draw.random() < 0.3:
                schema["title"] = schema["description"] = "some words"
        return schema

    def any(self, depth):
        kinds = [self.leaf] * 4
        if depth > 0:
            kinds += [lambda: self.object(depth - 1)] * 3 + [lambda: self.array(depth - 1)] * 2
            kinds += [lambda: self.joined(depth - 1)] * 2 + [self.reference]
        return self.draw.choice(kinds)()

    def leaf(self):
        kinds = (self.string, self.number, self.values, self.values, self.plain)
        return self.draw.choice(kinds)()

    def plain(self):
        kinds = ["string", "integer", "number", "boolean", "null", "object", "array"]
        return self.draw.choice([True, {}, *({"type": one} for one in kinds), {"type": self.draw.sample(kinds[:5], 2)}])

    def string(self):
        draw = self.draw
        schema = {"type": "string"}
        if draw.random() < 0.3:
            schema["minLength"] = draw.randrange(4)
        if draw.random() < 0.3:
            schema["maxLength"] = draw.randrange(4, 40)
        kind = draw.random()
        if kind < 0.25:
            schema = {"type": "string", "pattern": draw.choice(PATTERNS)}
        elif kind < 0.45:
            schema = {"type": "string", "format": draw.choice(FORMATS)}
        elif kind < 0.52:
            schema["not"] = {"enum": draw.sample(WORDS, 2)}
        elif kind < 0.57:
            schema |= {"pattern": "^[a-z]*$"}
        return schema

    def number(self):
        draw = self.draw
        schema = {"type": draw.choice(["integer", "number"])}
        low = draw.choice([-100, -7, 0, 0.5, 3, -0.25, 1e-3, 10**12])
        if draw.random() < 0.5:
            schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
        if draw.random() < 0.5:
            schema[draw.choice(["maximum", "exclusiveMaximum"])] = low + draw.choice([1, 2, 20, 1000, 7.75])
        if draw.random() < 0.15:
            schema["multipleOf"] = draw.choice([2, 5, 10, 3])
            schema = {name: value for name, value in schema.items() if not name.startswith("exclusive")}
            schema |= {"minimum": 0} if "minimum" in schema else {}
            schema |= {"maximum": 500} if "maximum" in schema else {}
        return schema

    def values(self):
        draw = self.draw
        some = [*draw.sample(WORDS, 3), draw.randrange(-9, 9), True, None, 2.5, [1, "é"], {"a": "😀"}]
        if draw.random() < 0.3:
            return {"const": draw.choice(some)}
        if draw.random() < 0.5:
            return {"type": "string", "enum": draw.sample(WORDS, draw.randrange(1, 6))}
        return {"enum": draw.sample(some, draw.randrange(1, 6))}

    def object(self, depth):
        draw = self.draw
        names = draw.sample(WORDS, draw.randrange(0, 5))
        schema = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        if names and draw.random() < 0.7:
            schema["required"] = draw.sample(names, draw.randrange(0, len(names) + 1))
        kind = draw.random()
        if kind < 0.4:
            schema["additionalProperties"] = False
        elif kind < 0.55:
            schema["additionalProperties"] = self.any(depth - 1)
        elif kind < 0.62:
            schema["patternProperties"] = {draw.choice(("^x-", "\\d$", "^[a-z]+$")): self.any(depth - 1)}
        elif kind < 0.68:
            schema |= {"additionalProperties": self.leaf(), "propertyNames": {"maxLength": 9}}
        elif kind < 0.73 and names:
            schema |= {"minProperties": min(len(names), 1), "maxProperties": len(names)}
        elif kind < 0.78 and len(names) > 1:
            schema["dependentRequired"] = {names[0]: [names[1]]}
        return schema

    def array(self, depth):
        draw = self.draw
        schema = {"type": "array", "items": self.any(depth)}
        if draw.random() < 0.5:
            schema["minItems"] = draw.randrange(3)
        if draw.random() < 0.5:
            schema["maxItems"] = draw.randrange(3, 6)
        kind = draw.random()
        if kind < 0.15:
            schema["prefixItems"] = [self.any(depth - 1), self.leaf()]
            schema["items"] = draw.choice([False, self.leaf()])
            schema.pop("minItems", None)
        elif kind < 0.22:
            schema["contains"] = {"type": "integer", "minimum": 5}
            schema["items"] = {"type": ["integer", "string"]}
            schema["maxItems"] = 5
        elif kind < 0.3:
            schema |= {"items": {"enum": draw.sample(WORDS, 4)}, "uniqueItems": True}
        return schema

    def joined(self, depth):
        draw = self.draw
        kind = draw.random()
        if kind < 0.35:
            return {"anyOf": [self.any(depth) for _ in range(draw.randrange(1, 4))]}
        if kind < 0.55:
            tags = draw.sample(WORDS, 3)
            branches = []
            for tag in tags:
                one = self.object(depth)
                one["properties"]["kind"] = {"const": tag}
                one["required"] = [*one.get("required", []), "kind"]
                branches.append(one)
            return {"oneOf": branches}
        if kind < 0.65:
            return {"oneOf": [{"type": "null"}, self.string(), self.array(depth)]}
        if kind < 0.85:
            base = self.object(depth)
            return {"allOf": [base, {"type": "object", "properties": {"zz": self.leaf()}, "required": ["zz"]}],
                    "description": "both"} if base.get("additionalProperties", True) is not False else base  # fmt: skip
        if kind < 0.93:
            met = {"properties": {"k": {"const": "é"}}, "required": ["k"]}
            named = {"k": {"enum": ["é", "è"]}, "v": {"type": "integer"}}
            return {"type": "object", "properties": named, "required": ["k"], "if": met, "then": {"required": ["v"]},
                    "else": {"properties": {"v": {"minimum": 5}}}}  # fmt: skip
        return {"not": {"type": draw.choice(["string", "object", "array"])}}

    def reference(self):
        names = ("#/$defs/leaf", "#/$defs/tree", "#/$defs/list%20é", "#/$defs/tree/properties/v", "#/$defs/leaf")
        schema = {"$ref": self.draw.choice(names)}
        return schema | ({"description": "one of these"} if self.draw.random() < 0.3 else {})
