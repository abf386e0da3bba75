"""Approval rules: their order, what a forbid rule stops on suspicion, patches, arguments, and rules that are refused.

What an allow rule covers of a shell command is in test_approval_commands.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue, ValidationError

from activities.tools.patch_parse import PatchFault, UpdateFile, parse_patch
from contracts.agent import AgentSpec, ApprovalPolicy, ApprovalRule, Verdict
from contracts.blob import BlobRef, Text
from contracts.model import ToolCall
from workflows.policy import Ruling, _path_glob, decide

ALLOW, PROMPT, FORBID = Verdict.ALLOW, Verdict.PROMPT, Verdict.FORBID
LOOKUP: dict[str, Any] = {
    "type": "activity",
    "name": "lookup",
    "description": "d",
    "parameters": {"type": "object"},
    "activity": "L",
    "task_queue": "q",
}


def ruling(policy: dict[str, Any], tool: str, arguments: JsonValue) -> Ruling:
    """What a policy says of a call."""
    text = Text(inline=json.dumps(arguments, ensure_ascii=False))
    call = ToolCall(call_id="c", name=tool, arguments=text, arguments_digest="d", summary=tool)
    return decide(ApprovalPolicy.model_validate(policy), call)


def allowing(*patterns: str, default: str = "prompt") -> dict[str, Any]:
    """A policy with one allow rule for commands."""
    return {"default": default, "rules": [{"command": list(patterns), "verdict": "allow"}]}


RULES: list[dict[str, Any]] = [
    {"command": ["git push --dry-run"], "verdict": "allow"},
    {"command": ["git push", "rm"], "verdict": "forbid", "reason": "people push"},
    {"command": ["git"], "verdict": "prompt", "reason": "it changes the repository"},
    {"command": ["ls"], "verdict": "allow"},
]


@pytest.mark.parametrize(
    ("command", "default", "verdict"),
    [
        ("git push --dry-run", "prompt", ALLOW),
        ("git push --dry-run; git push", "allow", FORBID),
        ("git push", "allow", FORBID),
        ("git --no-pager push", "allow", FORBID),
        ("/usr/bin/git push", "allow", FORBID),
        ("ls && git push", "allow", FORBID),
        ("git -c alias.x='push' x", "allow", FORBID),
        ("ls; git stash", "allow", PROMPT),
        ("ls", "forbid", ALLOW),
        ("ls; cat x", "forbid", FORBID),
        ("ls; cat x", "allow", ALLOW),
        *((x, "allow", FORBID) for x in ("rm x", "xargs rm", "echo $(rm x)", "X=1 rm x", "sh -c 'rm x'", "find . -exec rm x ;")),
        *(
            (x, "allow", FORBID)
            for x in ("sudo /bin/rm x", 'r"m" $x', "r$@m $x", "echo `rm`", "cat <<E\nrm\nE", "r\\m >x", "if true; then rm x; fi")
        ),
        *(
            (x, "allow", FORBID)
            for x in (
                *(
                    "env -S'rm x'",
                    "env -Srm",
                    "su -c'rm x'",
                    "script -qc'rm x'",
                    "xargs -n1rm",
                    "flock f -c'rm x'",
                    "man -P'rm x' ls",
                ),
                *("tar -I'rm x' -xf a", "sed '1erm x' f", "perl -e'rm x'", "su -c/bin/rm"),
                *("echo rm x | sh", "printf 'rm x' | cat | sudo bash", "ls; echo rm | xargs", "echo 'rm x' | perl"),
                *("r$z'm' x", "r${z}'m' x", 'r$z"m" x', "chronic rm x", "sudo rm-2.0 x"),
            )
        ),
        *(
            (x, "allow", ALLOW)
            for x in ("docker run --rm x", "grep rm f | less", "grep rm f; echo ls | sh", "echo rm | cat", "cat rm | python x.py")
        ),
        *((x, "allow", ALLOW) for x in ("grep -r rm .", "echo format", "echo $HOME", "cat a > confirm", "farm")),
    ],
)
def test_rules_go_in_order_and_the_strictest_part_counts(command: str, default: str, verdict: Verdict) -> None:
    """Forbidding needs only suspicion: a command that cannot be read, or runs others, and names the program."""
    assert ruling({"default": default, "rules": RULES}, "shell", {"command": command}).verdict is verdict


@pytest.mark.parametrize(
    ("pattern", "command", "verdict"),
    [
        *(
            ("python3", x, FORBID)
            for x in ("python x", "python3.11 x", "/usr/bin/python3.12 x", "sudo python3.11 x", "env python x")
        ),
        *(("python3", x, ALLOW) for x in ("python2 x", "sudo python2 x", "pythonx", "ipython3 --version")),
        *(("python", x, FORBID) for x in ("python2 x", "xargs python3.11")),
        *(("pip install", x, FORBID) for x in ("python3 -mpip install x", "pip3.11 install x")),
        *(("7z", x, ALLOW) for x in ("z x", "env z")),
    ],
)
def test_a_forbidden_program_is_found_in_its_versions(pattern: str, command: str, verdict: Verdict) -> None:
    """A name without a version is any of them; another version is another program."""
    policy = {"default": "allow", "rules": [{"command": [pattern], "verdict": "forbid"}]}
    assert ruling(policy, "shell", {"command": command}).verdict is verdict


def test_a_long_call_under_many_rules_is_decided_quickly() -> None:
    """A workflow that thinks for two seconds counts as deadlocked."""
    patterns = [[f"git sub{n} *" for n in range(100)] for _ in range(10)]
    rules = [{"command": some, "verdict": verdict} for some, verdict in zip(patterns, ["allow", "forbid"] * 5, strict=True)]
    begun = time.process_time()
    for command in (
        "env git x;" * 50,
        "env git x|" * 49 + "sh",
        "sh " + "-a-" * 1300,
        "git x;" * 2000,
        "env $x " + "subgit " * 500,
    ):
        ruling({"rules": rules}, "shell", {"command": command})
    paths = [{"path": [f"**/a*{n}-{m}*/**" for n in range(100)], "verdict": "forbid"} for m in range(10)]
    ruling({"rules": paths}, "apply_patch", {"patch": "*** Add File: a/b/c\n" * 190})
    assert time.process_time() - begun < 4


def test_a_ruling_says_why() -> None:
    """The rule's reason, or what stands in the way of an allow rule."""
    policy = {"default": "prompt", "rules": RULES}
    assert ruling(policy, "shell", {"command": "rm x"}) == Ruling(FORBID, "people push")
    assert "an expansion ($), and it names rm" in ruling(policy, "shell", {"command": "rm $x"}).reason
    assert "cannot be read for certain: it has a comment" in ruling(policy, "shell", {"command": "ls # x"}).reason
    assert "'-delete' may run another program or write" in ruling(allowing("find"), "shell", {"command": "find . -delete"}).reason
    assert ruling(allowing("find", default="forbid"), "shell", {"command": "find -delete"}).reason.startswith("find: '-delete'")


@pytest.mark.parametrize(
    ("arguments", "default", "verdict"),
    [
        ({"session": "s", "input": "ls\n"}, "prompt", PROMPT),
        ({"session": "s", "input": "ls\n"}, "forbid", FORBID),
        ({"session": "s", "input": "ls\n"}, "allow", ALLOW),
        ({"session": "s", "input": "rm x\n"}, "allow", FORBID),
        ({"session": "s"}, "prompt", ALLOW),
        ({"session": "s", "kill": True}, "forbid", ALLOW),
        ({"command": "ls", "tty": True, "wait_seconds": 1}, "prompt", ALLOW),
    ],
)
def test_typing_at_a_session_is_covered_by_no_rule(arguments: JsonValue, default: str, verdict: Verdict) -> None:
    """Waiting for what was already allowed to start is; forbidden words are looked for in what is typed too."""
    assert ruling({"default": default, "rules": RULES}, "shell", arguments).verdict is verdict


@pytest.mark.parametrize(
    ("default", "rules", "verdict"),
    [
        ("prompt", RULES[3:], PROMPT),
        ("forbid", RULES[3:], FORBID),
        ("allow", RULES[3:], ALLOW),
        ("allow", RULES, PROMPT),
        ("forbid", RULES, FORBID),
    ],
)
@pytest.mark.parametrize(
    "text", [Text(blob=BlobRef(digest="a" * 64, size=9999), preview='{"command":"ls"}'), Text(inline="[1"), Text(inline="[]")]
)
def test_arguments_that_cannot_be_read_match_no_allow_rule(text: Text, default: str, rules: list[Any], verdict: Verdict) -> None:
    """A person looks at what any other rule might stop."""
    call = ToolCall(call_id="c", name="shell", arguments=text, arguments_digest="d", summary="s")
    assert decide(ApprovalPolicy.model_validate({"default": default, "rules": rules}), call).verdict is verdict


PATHS: list[dict[str, Any]] = [
    {"path": ["**/secret*", ".git/**"], "verdict": "forbid", "reason": "not yours"},
    {"path": ["src/**", "*.md"], "verdict": "allow"},
]


@pytest.mark.parametrize(
    ("markers", "verdict"),
    [
        (["Add File: src/a.py"], ALLOW),
        (["Update File: ./src//b/c.py", "Delete File: README.md"], ALLOW),
        (["Update File: /workspace/src/a.py"], ALLOW),
        (["Update File: src/a.py", "Move to: setup.py"], PROMPT),
        (["Update File: src/a.py", "add file: x ***"], PROMPT),
        (["Update File: docs/a.md"], PROMPT),
        (["Add File: src/../x"], FORBID),
        (["Add File: src/a.py", "Add File: src/b/secret.txt"], FORBID),
        (["Add File: .git/config"], FORBID),
        ([], FORBID),
    ],
)
def test_every_file_of_a_patch_must_be_covered(markers: list[str], verdict: Verdict) -> None:
    """One that is not makes the whole call wait; one that is forbidden forbids it."""
    patch = "\n".join(["*** Begin Patch", *(f"*** {marker}\n+x" for marker in markers), "*** End Patch"])
    assert ruling({"default": "prompt", "rules": PATHS}, "apply_patch", {"patch": patch}).verdict is verdict


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "*** Add File: ",
                "***update file:",
                "*** Move to: ",
                "*** Delete File: ",
                "src/a",
                "x",
                "+y",
                "@@",
                " ",
                "***",
                "\r",
                "\n",
            ]
        ),
        max_size=12,
    )
)
def test_no_patch_that_applies_touches_a_file_that_was_not_looked_at(tokens: list[str]) -> None:
    """What policy reads of a patch is never less than what apply_patch does."""
    patch = "*** Begin Patch\n" + "".join(tokens) + "\n*** End Patch"
    try:
        operations = parse_patch(patch)
    except PatchFault:
        return
    touched = {one.path for one in operations} | {
        one.move_to for one in operations if isinstance(one, UpdateFile) and one.move_to
    }
    for path in touched:
        policy = {"default": "allow", "rules": [{"path": [path], "verdict": "forbid"}]}
        assert ruling(policy, "apply_patch", {"patch": patch}).verdict is FORBID


@pytest.mark.parametrize(
    ("patterns", "given", "allowed", "stopped"),
    [
        ({"env": "stag*"}, {"env": "staging", "x": 1}, True, True),
        ({"env": "stag*"}, {"env": "prod"}, False, False),
        ({"env": "stag*"}, {"env": "stag\nprod"}, False, True),
        ({"env": "stag*"}, {"env": ["staging"]}, False, True),
        ({"env": "stag*"}, {}, False, False),
        ({"env": ["a", "b"], "n": 1}, {"env": "b", "n": 1}, True, True),
        ({"n": 1}, {"n": True}, False, False),
        ({"n": 1}, {"n": "1"}, False, True),
        ({"on": True}, {"on": True}, True, True),
        ({"on": None}, {"on": None}, True, True),
        ({"url": "https://a.example/*"}, {"url": "https://a.example.evil/x"}, False, False),
    ],
)
def test_arguments_of_an_activity_tool(patterns: dict[str, Any], given: JsonValue, allowed: bool, stopped: bool) -> None:
    """Allowing compares values exactly; forbidding also looks inside them and at how they are written."""
    for verdict, default, expected in (
        ("allow", "prompt", ALLOW if allowed else PROMPT),
        ("forbid", "allow", FORBID if stopped else ALLOW),
    ):
        rules = [{"tool": "lookup", "arguments": patterns, "verdict": verdict}]
        assert ruling({"default": default, "rules": rules}, "lookup", given).verdict is expected


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({}, "a rule needs command, path or arguments"),
        ({"tool": "shell"}, "write approvals.tools"),
        ({"command": []}, "a rule needs command"),
        ({"command": ["ls"], "path": ["a"]}, "command and path in one rule"),
        ({"tool": "apply_patch", "command": ["ls"]}, "command with tool 'apply_patch': command is for shell"),
        ({"tool": "shell", "path": ["a"]}, "path is for apply_patch"),
        ({"arguments": {"a": 1}}, "name the activity tool"),
        ({"tool": "shell", "arguments": {"command": "ls"}}, "write command instead"),
        ({"command": ["* x"]}, "must name a program"),
        ({"command": [" "]}, "must name a program"),
        ({"command": ["git $ x"]}, "write it last"),
        ({"command": ["git status; ls"]}, "';' means something to the shell"),
        ({"command": ["ls *.py"]}, "'*' means something to the shell"),
        ({"command": [[]]}, "at least 1 item"),
        ({"path": ["/etc/*"]}, "path '/etc/*': a workspace path is relative"),
        ({"path": ["../x"]}, "stays inside the workspace"),
        ({"tool": "lookup", "arguments": {"a": []}}, "arguments.a: an empty list matches nothing"),
        ({"command": ["ls"] * 101}, "at most 100 items"),
        ({"command": ["ls"], "host": ["x"]}, "Extra inputs are not permitted"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(rule: dict[str, Any], told: str) -> None:
    """The message names the field, the value, and what to write."""
    with pytest.raises(ValidationError) as caught:
        ApprovalRule.model_validate({"verdict": "allow", **rule})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ([{"command": ["ls"]}] * 101, "at most 100 items"),
        ([{"command": ["ls"] * 100}] * 11, "1100 patterns together, more than 1000"),
        ([{"command": ["ls " + "x" * 900] * 80}], "bytes together, more than 65536"),
    ],
)
def test_rules_are_bounded(rules: list[dict[str, Any]], told: str) -> None:
    """They go through history and are tried on every call."""
    with pytest.raises(ValidationError, match=told):
        ApprovalPolicy.model_validate({"rules": [{**rule, "verdict": "allow"} for rule in rules]})


@pytest.mark.parametrize(
    ("rule", "tools", "told"),
    [
        ({"command": ["ls"]}, ["apply_patch"], "approvals.rules.0: no tool is named 'shell'; the agent has apply_patch"),
        ({"tool": "lookpu", "arguments": {"a": 1}}, ["shell"], "no tool is named 'lookpu'"),
        ({"command": ["ls"]}, [{**LOOKUP, "name": "shell"}], "'shell' is the name of one of Caisson's own tools"),
    ],
)
def test_a_rule_about_no_tool_of_the_agent_is_refused(rule: dict[str, Any], tools: list[Any], told: str) -> None:
    """A misspelt tool would leave the rule without effect."""
    with pytest.raises(ValidationError) as caught:
        AgentSpec.model_validate({"tools": tools, "approvals": {"rules": [{**rule, "verdict": "forbid"}]}})
    assert told in str(caught.value)


def test_rules_survive_being_written_and_read() -> None:
    """As every override of an agent is."""
    rules = [
        {"command": ["git status", ["ls", "a b"]], "verdict": "allow"},
        {"tool": "lookup", "arguments": {"a": [1, "x"]}, "verdict": "forbid"},
    ]
    spec = AgentSpec.model_validate({"tools": ["shell", LOOKUP], "approvals": {"rules": rules}})
    assert AgentSpec.model_validate_json(spec.model_dump_json()) == spec == AgentSpec.model_validate(spec.model_dump())


@given(
    glob=st.text("*?ab/", min_size=1, max_size=8).filter(lambda text: text.strip("/") != ""),
    path=st.text("ab/", min_size=1, max_size=10),
)
def test_a_glob_of_paths_means_what_a_plain_expression_does(glob: str, path: str) -> None:
    """Finding the middle of a glob only once gives what trying all places does."""
    parts = [part for part in glob.split("/") if part]
    plain = "/".join(re.escape(part).replace(r"\*", "[^/]*").replace(r"\?", "[^/]") for part in parts)
    if "**" not in parts:
        assert (_path_glob(glob).fullmatch(path) is None) == (re.fullmatch(plain, path) is None)


def test_a_glob_of_many_stars_takes_no_time() -> None:
    """Such as a file's own name may be."""
    glob, path = "*a" * 40 + "b", "a" * 4000
    started = time.process_time()
    assert _path_glob(glob).fullmatch(path) is None
    assert time.process_time() - started < 2
