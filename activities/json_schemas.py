"""JSON Schemas of answers and of tools' arguments: whether one can be used, and the validator that checks values against it.

Nothing is ever fetched: a schema that refers to what is not in it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any, Protocol

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from contracts.base import BadInput

_DATA = ("const", "default", "enum", "example", "examples")
"""Keywords whose values are data: what looks like a `$ref` there is none. `example` is OpenAPI's."""
_NAMED = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
"""Keywords that hold schemas by names of the author's own."""
_IN_PLACE = ("allOf", "anyOf", "dependentSchemas", "else", "if", "not", "oneOf", "then")
"""Keywords whose schemas are about the same value as the schema that they stand in."""
_SAMPLES: tuple[object, ...] = ({}, [], "", 0)


class Validator(Protocol):
    """What checks values against one schema."""

    def iter_errors(self, instance: object) -> Iterator[ValidationError]:
        """Return how a value does not fit."""

    def evolve(self, **changes: Any) -> Validator:
        """Return the same for a part of the schema."""


def _multiple_of(validator: object, divisor: float, instance: object, schema: object) -> Iterator[ValidationError]:
    # As numbers are written: in binary fractions, 19.99 would be no multiple of 0.01.
    if not isinstance(instance, (int, float)) or isinstance(instance, bool):
        return
    if (Fraction(str(instance)) / Fraction(str(divisor))).denominator != 1:
        yield ValidationError(f"{instance!r} is not a multiple of {divisor}")


_Validator = extend(Draft202012Validator, {"multipleOf": _multiple_of})  # type: ignore[no-untyped-call]


def validator_of(schema: Mapping[str, object]) -> Validator:
    """Return the validator of a schema, which fetches nothing."""
    validator: Validator = _Validator(schema, registry=Registry())
    return validator


def check_form(field: str, schema: Mapping[str, object]) -> None:
    """Check that something is a JSON Schema that refers to nothing outside of it, without using it. Raises BadInput."""
    _check_keywords(field, schema)
    for part in _parts(schema):
        if (ref := _ref(part)) is not None:
            _target(field, schema, ref)


def check_schema(field: str, schema: Mapping[str, object]) -> None:
    """Check that a JSON Schema can be used for whatever value, before a model is paid for one. Raises BadInput."""
    _check_keywords(field, schema)
    targets, parts = _follow(field, schema)
    same_value = {id(part): [id(one) for one in _in_place(part)] for part in parts}
    for part in parts:
        if (ref := _ref(part)) is not None:
            same_value[id(part)].append(id(targets[ref]))
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError as error:
        raise BadInput(f"{field}: its $ref go round in circles; each must come to an end") from error
    validator = validator_of(schema)
    try:
        for place in (schema, *({"$ref": ref} for ref in targets)):
            for sample in _SAMPLES:
                list(islice(validator.evolve(schema=place).iter_errors(sample), 100))
    except Exception as error:  # a schema can make its validator raise anything
        raise BadInput(f"{field}: cannot be used: {_said(error)}; write it in a simpler way") from error


def _follow(field: str, schema: Mapping[str, object]) -> tuple[dict[str, object], list[dict[str, Any]]]:
    """Return what each `$ref` of a schema leads to, and all parts of the schema. Raises BadInput for what is not taken."""
    targets: dict[str, object] = {}
    parts: dict[int, dict[str, Any]] = {}
    ahead: list[object] = [schema]
    while ahead:
        for part in _parts(ahead.pop()):
            if id(part) in parts:
                continue
            parts[id(part)] = part
            if other := next((name for name in ("$dynamicRef", "$recursiveRef") if name in part), None):
                raise BadInput(f"{field}: {other} is not followed; write a $ref to a place in the schema instead")
            if "$id" in part and part is not schema:
                raise BadInput(f"{field}: a part of it has an $id, {str(part['$id'])[:100]!r}; only the whole may have one")
            if (ref := _ref(part)) is None or ref in targets:
                continue
            targets[ref] = target = _target(field, schema, ref)
            if not isinstance(target, (dict, bool)):
                raise BadInput(f"{field}: $ref {ref!r} leads to what is no schema; correct it")
            if isinstance(target, dict) and target is not schema:
                _check_keywords(f"{field}: $ref {ref!r}", target)
                ahead.append(target)
    return targets, list(parts.values())


def _check_keywords(field: str, schema: Mapping[str, object]) -> None:
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        where = ".".join(map(str, error.absolute_path))
        raise BadInput(f"{field}: not a JSON Schema (2020-12): {where + ': ' if where else ''}{error.message[:300]}") from error
    except Exception as error:  # a number in a pattern may be too large, a schema too deep, and more
        raise BadInput(f"{field}: not a JSON Schema (2020-12): {_said(error)}; correct it, or leave it out") from error


def _target(field: str, schema: Mapping[str, object], ref: str) -> object:
    if not ref.startswith("#"):
        raise BadInput(f"{field}: $ref {ref[:200]!r} leads outside the schema; write what it stands for into $defs")
    try:
        resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
        target: object = resolver.lookup(ref).contents
    except Exception as error:  # a place below a number, or with a word for an index, is no Unresolvable
        raise BadInput(f"{field}: $ref {ref[:200]!r} leads nowhere; correct it, or add what it names to $defs") from error
    return target


def _ref(part: Mapping[str, object]) -> str | None:
    ref = part.get("$ref")
    return ref if isinstance(ref, str) else None


def _parts(schema: object) -> Iterator[dict[str, Any]]:
    """Return a schema and all schemas in it, each before its parts."""
    ahead = [schema]
    while ahead:
        value = ahead.pop()
        if isinstance(value, dict):
            yield value
            ahead += [below for _, below in _below(value)]
        elif isinstance(value, list):
            ahead += value


def _below(schema: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            yield from ((keyword, below) for below in value.values())
        elif keyword not in _DATA:
            yield keyword, value


def _in_place(schema: Mapping[str, object]) -> Iterator[object]:
    for keyword, value in _below(schema):
        if keyword in _IN_PLACE:
            yield from value if isinstance(value, list) else (value,)


def _said(error: Exception) -> str:
    return "it nests too deeply" if isinstance(error, RecursionError) else f"{type(error).__name__}: {error}"[:300]
