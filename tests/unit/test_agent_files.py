"""Agents as files: what is read, what is refused with file and line, and that no file can take a worker down."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from activities.agents import AgentDirectory, resolve
from activities.plain_yaml import MAX_FILE
from contracts.agent import AgentSpec
from contracts.base import BadInput
from contracts.run import RunInput

Refused = Callable[[str | bytes], str]


@pytest.fixture
def refused(tmp_path: Path) -> Refused:
    """How an agent whose file holds this is refused."""

    def load(content: str | bytes) -> str:
        (tmp_path / "odd.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(BadInput) as caught:
            AgentDirectory(tmp_path).load("odd")
        assert str(tmp_path / "odd.yaml") in str(caught.value)
        return str(caught.value)

    return load


def agent_of(directory: Path, text: str) -> AgentSpec:
    """The agent whose file holds this."""
    (directory / "fine.yaml").write_text(text)
    return AgentDirectory(directory).load("fine")


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("instructions: x\n\ninstructions: y\n", "line 3: 'instructions' is given twice in one mapping; keep one of them"),
        ("approvals:\n  tools:\n    shell: forbid\n    shell: allow\n", "line 4: 'shell' is given twice"),
        ("output_schema: " + "[" * 2000 + "]" * 2000, "nests deeper than 100 levels"),
        ("budget: {steps: " + "9" * 5000 + "}", "line 1: a number of 5000 digits is too large"),
        ("output_schema: {maximum: .nan}", "'.nan' is no finite number"),
        ("output_schema: {maximum: -1.0e+400}", "'-1.0e+400' is no finite number"),
        (
            "manifest:\n  environment: {NO: '1'}\n",
            "line 2: the name of a field must be text, but 'NO' is read as bool; put it in",
        ),
        ("2024: x", "'2024' is read as int"),
        ("? [a]\n: x", "the name of a field must be text"),
        ("instructions: !!binary aGVsbG8=", "!!binary is not taken here"),
        ("instructions: !env HOME", "!env is not taken here"),
        ("output_schema: &a {properties: {x: *a}}", "an alias stands within what it is an alias of"),
        (LAUGHS, "holds more than 20000 values, aliases counted each time"),
        ("output_schema: {enum: [" + "1, " * 30_000 + "]}", "holds more than 20000 values"),
        ("# " + "x" * MAX_FILE, f"is larger than {MAX_FILE} bytes"),
        ("instructions: hi".encode("utf-16"), "is not UTF-8 text: invalid start byte at byte 0; save it as UTF-8"),
        ("instructions: [", "is not YAML"),
        ("a: 1\n---\nb: 2\n", "is not YAML"),
        ("", "must hold a mapping of the fields"),
        ("budget: {steps: true}", "budget.steps: must be a number, not a boolean"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_fault(refused: Refused, content: str | bytes, told: str) -> None:
    """Nothing of it is read in some other way than it was meant."""
    assert told in refused(content)


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("description: 2024-13-45", "2024-13-45"),
        ("description: 2024-01-01", "2024-01-01"),
        ("\ufeffdescription: after a mark", "after a mark"),
        ("budget: &b {steps: 5}\nsubagents: [{name: r, description: d, agent: {budget: *b}}]\ndescription: alias", "alias"),
    ],
)
def test_what_json_can_say_is_read(tmp_path: Path, text: str, description: str) -> None:
    """A date is text, as it is in JSON; a byte order mark and aliases do no harm."""
    assert agent_of(tmp_path, text).description == description


def test_a_merged_mapping_may_be_overridden(tmp_path: Path) -> None:
    """That is no field given twice."""
    text = "budget: &b {steps: 5, tokens: 7}\nsubagents: [{name: r, description: d, agent: {budget: {<<: *b, steps: 6}}}]\n"
    role = agent_of(tmp_path, text).subagents[0].agent
    assert isinstance(role, AgentSpec)
    assert (role.budget.steps, role.budget.tokens) == (6, 7)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    """A pipe that nobody writes to would hold the worker for ever."""
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "directory.yaml").mkdir()
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    directory = AgentDirectory(tmp_path)
    for name, told in (("pipe", "no regular file"), ("directory", "no regular file"), ("gone", "cannot be read: No such file")):
        with pytest.raises(BadInput, match=told):
            directory.load(name)


def test_both_endings_are_read_and_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """A file is never ignored for how its name ends."""
    (tmp_path / "one.yml").write_text("description: here\n")
    directory = AgentDirectory(tmp_path)
    assert (directory.names(), directory.load("one").description) == (["one"], "here")
    (tmp_path / "one.yaml").write_text("description: there\n")
    with pytest.raises(BadInput, match=r"there are .*one\.yaml and .*one\.yml; remove one of them"):
        directory.load("one")


def resolved(directory: Path, role: dict[str, Any], **agent: Any) -> AgentSpec:
    """An inline agent with one role, resolved."""
    role = {"name": "helper", "description": "d", **role}
    request = RunInput.model_validate({"task": "x", "agent": {"subagents": [role], **agent}})
    return resolve(request, AgentDirectory(directory), "m").spec


BROKEN: dict[str, Any] = {"output_schema": {"type": "objekt"}}


@pytest.mark.parametrize(
    ("role", "told"),
    [
        ({"agent": "nobody"}, "subagents.helper: agent: no agent is named 'nobody'"),
        ({"agent": "typo"}, "subagents.helper: agent 'typo' .*toolz: unknown field"),
        ({"agent": BROKEN}, "subagents.helper: output_schema: not a JSON Schema"),
    ],
)
def test_the_agents_of_roles_are_checked_before_anything_is_spent(tmp_path: Path, role: dict[str, Any], told: str) -> None:
    """Else the model would learn of it when it starts one. Those that run elsewhere, or cannot be started, are not."""
    (tmp_path / "typo.yaml").write_text("toolz: [shell]\n")
    with pytest.raises(BadInput, match=f"(?s){told}"):
        resolved(tmp_path, role)
    assert resolved(tmp_path, {**role, "task_queue": "elsewhere"}).subagents
    assert resolved(tmp_path, role, subagent_limits={"depth": 0}).subagents


def test_agents_that_are_roles_of_each_other_come_to_an_end(tmp_path: Path) -> None:
    """Each is looked at once, as deep as subagents may go."""
    for name, other in (("one", "other"), ("other", "one")):
        (tmp_path / f"{name}.yaml").write_text(
            f"subagents: [{{name: r, description: d, agent: {other}}}]\nsubagent_limits: {{depth: 5}}\n"
        )
    assert resolved(tmp_path, {"agent": "one"}, subagent_limits={"depth": 5}).subagents


def test_the_model_is_told_which_hosts_the_network_reaches(tmp_path: Path) -> None:
    """Or that there is none; of many hosts the first are named."""

    def said(*hosts: str) -> str:
        request = RunInput.model_validate({"task": "x", "sandbox": {"network": {"allow": hosts}}})
        return resolve(request, AgentDirectory(tmp_path), "m").instructions

    assert "There is no network." in said()
    assert "only these hosts, by HTTPS and HTTP: pip.example.com, *.example.org." in said("pip.example.com", "*.example.org")
    assert "h19.example.org and 80 more." in said(*(f"h{n}.example.org" for n in range(100)))
