"""Structured answers: checked against the schema, corrected once, and of any size."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from contracts.blob import BlobRef
from tests.integration.stack import Stack

SCHEMA = {
    "type": "object",
    "properties": {"rows": {"type": "integer"}, "file": {"type": "string"}},
    "required": ["rows", "file"],
    "additionalProperties": False,
}
ANSWER = {"rows": 3, "file": "t.csv"}
WIDE = {"tools": [{"type": "shell", "output_bytes": 262_144}]}


async def answered(stack: Stack, scenario: str, agent: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the result of a run whose answer must satisfy the schema."""
    return await stack.finish(await stack.start(scenario, agent or {"tools": []}, output_schema=SCHEMA))


async def test_an_answer_that_satisfies_the_schema_is_an_object_in_the_result(stack: Stack) -> None:
    """Whoever started the run gets the object, not its text."""
    result = await answered(stack, "valid-object")
    assert (result["status"], result["output"], result["steps"]) == ("completed", ANSWER, 1)


@pytest.mark.parametrize("scenario", ["corrected-object", "prose-then-object", "no-json-number"])
async def test_an_answer_that_does_not_is_corrected_once(stack: Stack, scenario: str) -> None:
    """The model is told each fault with its place, and its second answer counts."""
    result = await answered(stack, scenario)
    assert (result["status"], result["output"], result["steps"]) == ("completed", ANSWER, 2)


async def test_a_second_wrong_answer_ends_the_run_with_the_fault(stack: Stack) -> None:
    """The failure names the schema, the place and what was found."""
    handle = await stack.start("never-valid", {"tools": []}, output_schema=SCHEMA)
    error = await stack.failure(handle)
    assert error.type == "RunFailed"
    assert error.message.startswith("output_schema: the answer does not satisfy it, also after a correction: ")
    assert "rows: 'still 2' is not of type 'integer'" in error.message
    assert stack.answered(handle) == [1, 2]


async def test_work_between_two_wrong_answers_gives_no_further_correction(stack: Stack) -> None:
    """The one correction is for the whole run, so that a model cannot go round for ever."""
    handle = await stack.start("faults-between-steps", output_schema=SCHEMA)
    assert "also after a correction" in (await stack.failure(handle)).message


async def test_a_huge_answer_is_a_preview_and_a_blob(stack: Stack) -> None:
    """History carries a few hundred characters of 200 KB; the whole text is in the store."""
    handle = await stack.start("huge-answer", WIDE)
    result = await stack.finish(handle)
    text = (await stack.dev.blobs.get(BlobRef.model_validate(result["output_blob"]))).decode()
    assert text == f"begin {'x' * 200_000} end"
    assert (len(result["output"]) < 1000, result["output"][:7], result["output"][-4:]) == (True, "begin x", " end")
    assert await stack.history_bytes(handle) < 40_000


async def test_a_huge_object_is_checked_and_kept_as_a_blob(stack: Stack) -> None:
    """An object that is too long for history satisfies its schema all the same."""
    result = await answered(stack, "huge-object", WIDE)
    stored = json.loads(await stack.dev.blobs.get(BlobRef.model_validate(result["output_blob"])))
    assert (result["status"], stored) == ("completed", {"rows": 1, "file": "x" * 200_000})


async def test_runs_with_different_schemas_do_not_meet(stack: Stack) -> None:
    """One process checks many runs at once, each against its own schema."""
    other = {"type": "object", "required": ["nothing like it"]}
    good, bad = await asyncio.gather(
        answered(stack, "valid-object"),
        stack.failure(await stack.start("never-valid", {"tools": []}, output_schema=other)),
    )
    assert (good["output"], "'nothing like it' is a required property" in bad.message) == (ANSWER, True)
