"""JSON Schemas: those that cannot be used are refused before a model is paid for an answer, and nothing is ever fetched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.json_schemas import check_form, check_schema, validator_of
from activities.model.calls import schema_faults
from activities.model.request import build_request
from contracts.agent import AgentSpec
from contracts.base import BadInput
from contracts.prepare import ResolvedAgent

X = {"$ref": "#/$defs/x"}


def of_a(part: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A schema of an object with one property."""
    return {"type": "object", "properties": {"a": part}, **more}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (of_a({"$dynamicRef": "#nope"}), r"\$dynamicRef is not followed"),
        (of_a({"$dynamicRef": "http://127.0.0.1:9/x"}), r"\$dynamicRef is not followed"),
        (of_a({"$recursiveRef": "#"}), r"\$recursiveRef is not followed"),
        (of_a({"$id": "urn:a", "$ref": "#/$defs/b"}, **{"$defs": {"b": {}}}), r"a part of it has an \$id, 'urn:a'"),
        (of_a(X, **{"$defs": {"x": X}}), r"its \$ref go round in circles"),
        (of_a(X, **{"$defs": {"x": {"allOf": [X]}}}), r"its \$ref go round in circles"),
        (of_a(X, **{"$defs": {"x": {"anyOf": [{"type": "object"}, X]}}}), r"its \$ref go round in circles"),
        (of_a(X, **{"$defs": {"x": {"if": {"not": X}}}}), r"its \$ref go round in circles"),
        (of_a({"$ref": "#/x/y"}, x=5), "leads nowhere"),
        (of_a({"$ref": "#/x"}, x=5), "leads to what is no schema"),
        (of_a({"$ref": "#/required"}, required=["a"]), "leads to what is no schema"),
        (of_a({"$ref": "#/allOf/x"}, allOf=[{}]), "leads nowhere"),
        (of_a({"$ref": "#/x"}, x={"type": "objekt"}), r"\$ref '#/x': not a JSON Schema"),
        (of_a({"$ref": "#/x"}, x=of_a({"$ref": "other.json"})), "leads outside the schema"),
        (of_a({"$ref": "#/default"}, default={"$ref": "other.json"}), "leads outside the schema"),
        (of_a({"pattern": "a{99999999999}"}), "not a JSON Schema .*too large"),
        (of_a({"$ref": "#/x"}, x={"pattern": "("}), "not a JSON Schema"),
        ({"$schema": 5}, "not a JSON Schema"),
    ],
)
def test_a_schema_that_would_fail_on_some_value_is_refused(schema: dict[str, Any], told: str) -> None:
    """The message begins with the field."""
    with pytest.raises(BadInput, match=f"^output_schema.*{told}"):
        check_schema("output_schema", schema)


@pytest.mark.parametrize(
    ("schema", "fits", "fits_not"),
    [
        (of_a({"type": "array", "items": {"$ref": "#"}}), {"a": [{"a": []}]}, {"a": [{"a": 5}]}),
        (of_a({"enum": [{"$ref": "http://x"}]}), {"a": {"$ref": "http://x"}}, {"a": 5}),
        (of_a({"type": "string", "default": {"$ref": "x"}, "examples": [{"$id": "y"}]}), {"a": "b"}, {"a": 5}),
        ({"properties": {"$ref": {"type": "string"}, "enum": {"type": "null"}}}, {"$ref": "x"}, {"enum": 1}),
        ({**of_a({"$ref": "#/$defs/b"}), "$id": "urn:x:y", "$defs": {"b": {"type": "string"}}}, {"a": "x"}, {"a": 1}),
        (of_a({"$ref": "#b"}, **{"$defs": {"b": {"$anchor": "b", "type": "string"}}}), {"a": "x"}, {"a": 1}),
        (of_a({"$ref": "#/$defs/a%20b"}, **{"$defs": {"a b": {"type": "string"}}}), {"a": "x"}, {"a": 1}),
        (of_a({"multipleOf": 0.01}), {"a": 19.99}, {"a": 19.999}),
        (of_a({"multipleOf": 0.01}), {"a": 1e300}, {"a": 0.001}),
        (of_a({"multipleOf": 3}), {"a": 9}, {"a": 10.0}),
    ],
)
def test_a_schema_that_can_be_used_is_taken(schema: dict[str, Any], fits: object, fits_not: object) -> None:
    """What only looks like a reference is data, and decimal numbers are counted as they are written."""
    check_form("output_schema", schema)
    check_schema("output_schema", schema)
    assert list(validator_of(schema).iter_errors(fits)) == []
    assert list(validator_of(schema).iter_errors(fits_not)) != []


_NAMES = st.sampled_from(
    [
        "$ref",
        "$id",
        "$anchor",
        "$defs",
        "$dynamicRef",
        "allOf",
        "not",
        "items",
        "properties",
        "type",
        "x",
        "pattern",
        "multipleOf",
    ]
)
_LEAVES = st.sampled_from(["#", "#/$defs/x", "#/x", "#/allOf/0", "object", "x", "(", "urn:x", "http://[x", 0, 1.5, True, None])


@given(st.dictionaries(_NAMES, st.recursive(_LEAVES, lambda of: st.lists(of, max_size=2) | st.dictionaries(_NAMES, of))))
def test_any_schema_is_refused_or_can_be_used(schema: dict[str, Any]) -> None:
    """Whatever a schema is made of, nothing but BadInput comes of it, and then no value breaks it."""
    try:
        check_schema("output_schema", schema)
    except BadInput:
        return
    for value in ({}, {"x": {"x": 1}}, [[1], "x"], "x", 7.5):
        list(validator_of(schema).iter_errors(value))


@pytest.mark.parametrize("part", [{"$dynamicRef": "http://127.0.0.1:9/x"}, {"$ref": "#/x/y"}, {"pattern": "a{99999999999}"}])
def test_an_answer_is_never_lost_to_its_schema(part: dict[str, Any]) -> None:
    """The fault is told; a retry would pay for the answer once more."""
    assert schema_faults({"a": "b"}, of_a(part, x=5))[0].startswith("cannot be checked against the schema")


def closed(**properties: Any) -> dict[str, Any]:
    """An object as strict mode wants it."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT = {"type": "string"}
STRICT = (
    closed(a=TEXT, b={"type": ["integer", "null"], "minimum": 0}),
    closed(a={"type": "array", "items": closed(b=TEXT), "maxItems": 5, "description": "d"}),
    closed(a={"anyOf": [TEXT, closed(b={"type": "string", "enum": ["x"]})]}),
    {**closed(a={"$ref": "#/$defs/b"}), "$defs": {"b": closed(c={"type": "string", "format": "date"})}},
    closed(),
)
NOT_STRICT = (
    {},
    TEXT,
    {"type": "array", "items": TEXT},
    {"anyOf": [closed(a=TEXT)]},
    {**closed(a=TEXT), "anyOf": [closed(a=TEXT)]},
    {**closed(a=TEXT), "required": []},
    {**closed(a=TEXT), "additionalProperties": True},
    {**closed(a=TEXT), "if": {}, "then": {}},
    {**closed(a=TEXT), "patternProperties": {"x": TEXT}},
    {**closed(a={"$ref": "#/$defs/b"}), "$defs": {"b": {"allOf": [TEXT]}}},
    *(closed(a={**TEXT, name: value}) for name, value in (("not", {}), ("default", "x"), ("format", "uri"), ("minLength", 1))),
    *(closed(a=part) for part in ({}, {"description": "x"}, True, {"allOf": [TEXT]}, {"oneOf": [TEXT]}, {"type": "object"})),
    *(closed(a={"type": "array", **more}) for more in ({}, {"items": True}, {"items": TEXT, "uniqueItems": True})),
    closed(a={"$ref": "#", "description": "x"}),
)


@pytest.mark.parametrize(
    ("schema", "strict"),
    [*((one, True) for one in STRICT), *((one, False) for one in NOT_STRICT)],
    ids=lambda one: json.dumps(one),
)
def test_strict_mode_is_asked_for_only_where_the_service_takes_the_schema(schema: dict[str, Any], strict: bool) -> None:
    """A keyword that it does not know would make it refuse the request; the answer is checked here in any case."""
    agent = ResolvedAgent(spec=AgentSpec(output_schema=schema), model="m", instructions="")
    assert build_request(agent, [], "r", 1)["extra_body"]["text"]["format"]["strict"] is strict
