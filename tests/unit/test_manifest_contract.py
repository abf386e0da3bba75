"""What a manifest may say, and how a person is told what it may not."""

from __future__ import annotations

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
    "path", ["", " ", ".", "./", "..", "a/..", "a/../b", "../a", "/", "/a", "a\\b", "a\0", " a", "a\n", "x" * 256, "ü" * 128]
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


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"entries": {"a": {"type": "local", "path": ""}}}, "entries.a.local.path: "),
        ({"entries": {"a": {"type": "local", "path": "x\0y"}}}, "a path holds no NUL character"),
        ({"entries": {"a": {"type": "inline"}}}, "entries.a.inline.text: required, but missing"),
        ({"entries": {"a": {"type": "inline", "text": "x", "modes": 1}}}, "entries.a.inline.modes: unknown field"),
        ({"entries": {"a": {"text": "x"}}}, "entries.a: "),
        ({"outputs": [{"path": "/out"}]}, "outputs.0.path: "),
        ({"limits": {"max_bytes": 0}}, "limits.max_bytes: "),
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
