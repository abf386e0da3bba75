"""What a manifest may say, and how a person is told what it may not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.base import explain
from contracts.manifest import Manifest, check_workspace_path

INLINE = {"type": "inline", "text": "x"}


def refusal(**fields: Any) -> str:
    """How a manifest with these fields is refused."""
    with pytest.raises(ValidationError) as caught:
        Manifest.model_validate(fields)
    return explain(caught.value, "the manifest")


@pytest.mark.parametrize(
    ("path", "normal"),
    [("a", "a"), ("a/b.txt", "a/b.txt"), ("./a", "a"), ("a//b/", "a/b"), ("a/./b", "a/b"), ("ä/ b", "ä/ b"), ("...", "...")],
)
def test_a_path_is_brought_into_its_normal_form(path: str, normal: str) -> None:
    """Two spellings of one place are one place."""
    assert check_workspace_path(path) == normal


@pytest.mark.parametrize(
    "path",
    [
        "",
        " ",
        ".",
        "./",
        "..",
        "a/..",
        "a/../b",
        "../a",
        "/",
        "/a",
        "a\\b",
        "a\0",
        " a",
        "a\n",
        "x" * 256,
        "ü" * 128,
        "x/" * 2001,
    ],
)
def test_a_path_that_could_leave_the_workspace_is_refused(path: str) -> None:
    """So is one that no file system holds."""
    with pytest.raises(ValueError, match="workspace path"):
        check_workspace_path(path)


@given(st.text(max_size=40))
def test_whatever_is_accepted_stays_inside(path: str) -> None:
    """And its normal form is its own normal form."""
    try:
        normal = check_workspace_path(path)
    except ValueError:
        return
    assert not normal.startswith("/")
    assert all(part not in ("", ".", "..") for part in normal.split("/"))
    assert check_workspace_path(normal) == normal


def test_entries_lie_at_their_normal_places() -> None:
    """Who reads a manifest later finds each place in one spelling."""
    assert list(Manifest.model_validate({"entries": {"./a//b": INLINE}}).entries) == ["a/b"]


def test_two_spellings_of_one_place_are_refused() -> None:
    """One of the two files would be lost without a word."""
    assert "'a//b': another entry is at the same place" in refusal(entries={"a/b": INLINE, "a//b": INLINE})


@pytest.mark.parametrize("inside", ["a/b", "a/b/c"])
def test_an_entry_inside_another_is_refused(inside: str) -> None:
    """Which of the two is written first would decide what there is."""
    assert f"entries 'a' and '{inside}' overlap; give each its own place" in refusal(entries={"a": INLINE, inside: INLINE})


def test_an_entry_inside_another_is_found_between_names_that_begin_alike() -> None:
    """In the order of letters, `a-b` lies between `a` and `a/b`."""
    assert "entries 'a' and 'a/b' overlap" in refusal(entries={"a": INLINE, "a-b": INLINE, "a.txt": INLINE, "a/b": INLINE})


def test_ten_thousand_entries_are_checked_in_no_time() -> None:
    """A workflow checks them, which has two seconds for all that it does at once."""
    entries = {f"d/{n}": INLINE for n in range(10_000)}
    begun = time.process_time()
    assert len(Manifest.model_validate({"entries": entries}).entries) == 10_000
    assert time.process_time() - begun < 1.5


def test_names_that_only_begin_alike_do_not_overlap() -> None:
    """`a.txt` and `a` are two files, and so is what lies beside them."""
    assert len(Manifest.model_validate({"entries": {"a": INLINE, "a.txt": INLINE, "a-b/c": INLINE}}).entries) == 3


@pytest.mark.parametrize(
    "name", ["OPENAI_API_KEY", "db_password", "GitHub_Token", "CLIENT_SECRET", "apikey", "aws_credentials", "PRIVATE_KEY"]
)
def test_an_environment_name_that_means_a_credential_is_refused(name: str) -> None:
    """The sandbox never holds one."""
    assert f"environment {name} looks like a credential" in refusal(environment={name: "x"})


@pytest.mark.parametrize(
    "value", ["sk-" + "a" * 20, "ghp_" + "A1" * 12, "AKIA" + "A" * 16, "x -----BEGIN RSA PRIVATE KEY-----", "gho_" + "b" * 30]
)
def test_an_environment_value_that_is_a_credential_is_refused_and_not_repeated(value: str) -> None:
    """The error is read by more people than the input."""
    message = refusal(environment={"X": value})
    assert "environment X looks like a credential" in message
    assert value not in message


@pytest.mark.parametrize(("name", "value"), [("TZ", "UTC"), ("_x1", ""), ("KEYBOARD", "de"), ("SKIP", "sk-1")])
def test_plain_values_are_accepted(name: str, value: str) -> None:
    """What only resembles a credential is none."""
    assert Manifest.model_validate({"environment": {name: value}}).environment == {name: value}


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "A\n", "Ä"])
def test_an_environment_name_that_no_shell_takes_is_refused(name: str) -> None:
    """It would be lost, or set something else."""
    assert f"environment name {name!r} is not a valid variable name" in refusal(environment={name: "x"})


def test_a_nul_in_a_value_is_refused() -> None:
    """No process could be started with it."""
    assert "environment A holds a NUL character" in refusal(environment={"A": "x\0y"})


def test_the_home_directory_is_the_sandboxes_own() -> None:
    """A sandbox whose home is elsewhere could not be started."""
    assert "environment HOME is the sandbox's own; take it out" in refusal(environment={"HOME": "/x"})


@pytest.mark.parametrize("value", ["x" * 102_401, "ü" * 51_201])
def test_a_value_that_no_program_could_be_started_with_is_refused(value: str) -> None:
    """Every command of the run would fail. What is just below is taken."""
    assert "environment A is longer than 102400 bytes" in refusal(environment={"A": value})
    assert Manifest.model_validate({"environment": {"A": value[:51_200]}}).environment


@pytest.mark.parametrize("command", [" ", "\n", "\t\x1c\u2028", ""])
def test_a_blank_command_of_the_setup_is_refused(command: str) -> None:
    """It has no first line that could be shown while it runs."""
    assert "setup.0: " in refusal(setup=[command])


def test_the_same_output_twice_is_refused_and_for_two_places_it_is_not() -> None:
    """One path may go to two buckets; twice to the same place is a mistake."""
    bucket = {"type": "s3", "bucket": "results", "prefix": "p/"}
    assert "outputs: 'a' is given more than once" in refusal(outputs=[{"path": "a"}, {"path": "b"}, {"path": "./a/"}])
    assert "outputs: 'a' is given more than once" in refusal(outputs=[{"path": "a", "to": bucket}] * 2)
    assert len(Manifest.model_validate({"outputs": [{"path": "a"}, {"path": "a", "to": bucket}, {"path": "a/b"}]}).outputs) == 3


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"entries": {"a": {"type": "local", "path": ""}}}, "entries.a.path: "),
        ({"entries": {"a": {"type": "local", "path": "x\0y"}}}, "a path holds no NUL character"),
        ({"entries": {"a": {"type": "inline"}}}, "entries.a.text: required, but missing"),
        ({"entries": {"a": {"type": "inline", "text": "x", "modes": 1}}}, "entries.a.modes: unknown field"),
        ({"entries": {"a": {"text": "x"}}}, "entries.a: "),
        ({"outputs": [{"path": "/out"}]}, "outputs.0.path: "),
        ({"limits": {"max_bytes": 0}}, "limits.max_bytes: "),
        ({"limits": {"max_bytes": True}}, "limits.max_bytes: must be a number, not a boolean"),
        ({"limits": {"max_files": -1}}, "limits.max_files: "),
        ({"entry": {}}, "entry: unknown field; remove it or correct its name"),
    ],
)
def test_a_fault_is_told_with_its_place(fields: dict[str, Any], told: str) -> None:
    """Whoever wrote the manifest knows where to look."""
    assert told in refusal(**fields)


def test_the_outputs_are_in_outputs_unless_said_otherwise() -> None:
    """A run without a manifest has artifacts too."""
    assert [output.path for output in Manifest().outputs] == ["outputs"]
    assert Manifest.model_validate({"outputs": []}).outputs == ()
