"""What policy says of one tool call. Pure: the same call under the same policy always gets the same verdict.

Rules go in order, then the tool's own verdict, then the default. A call has parts: the simple commands of a shell command, the
files of a patch, or the arguments of an activity tool as a whole. For each part the first rule that is about it counts, and the
call gets the strictest verdict of its parts. Rules fail closed: an allow rule needs certainty, the others suspicion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

from pydantic import JsonValue

from contracts.agent import MAX_PATTERNS, ApprovalPolicy, ApprovalRule, Verdict
from contracts.manifest import check_workspace_path
from contracts.mcp import all_of
from contracts.model import ToolCall
from contracts.sandbox import WORKSPACE
from workflows.shell_danger import danger_of, program_of, runs_input
from workflows.shell_words import SimpleCommand, Unreadable, Word, mentions, mentions_after_e, read_pipelines, same_program

_TOO_LONG = "the arguments are too long for the rules to read"
_STRICTNESS = (Verdict.ALLOW, Verdict.PROMPT, Verdict.FORBID)


@dataclass(frozen=True)
class Ruling:
    """A verdict, and why, in words for the model or the person who is asked; empty when no rule says why."""

    verdict: Verdict
    reason: str = ""


def decide(policy: ApprovalPolicy, call: ToolCall) -> Ruling:
    """Return the ruling for a call: that of its rules, else its tool's or its MCP server's verdict, else the policy's default."""
    base = policy.tools.get(call.name, policy.tools.get(all_of(call.name), policy.default))
    rules = [rule for rule in policy.rules if rule.about == call.name]
    if not rules:
        return Ruling(base)
    arguments = _arguments(call)
    if arguments is None:
        # Nothing is certain, so a person looks at what any rule might stop.
        stops = any(rule.verdict is not Verdict.ALLOW for rule in rules)
        return _strictest([Ruling(base, _TOO_LONG), Ruling(Verdict.PROMPT if stops else base, _TOO_LONG)])
    return _strictest([_settle(part, rules, base) for part in _parts(arguments, rules[0])])


def _strictest(rulings: Sequence[Ruling]) -> Ruling:
    return max(rulings, key=lambda ruling: _STRICTNESS.index(ruling.verdict))


def _settle(part: _Part, rules: Sequence[ApprovalRule], base: Verdict) -> Ruling:
    least: list[Ruling] = []
    for rule in rules:
        if rule.verdict is Verdict.ALLOW:
            doubt = part.covered_by(rule)
            if doubt == "":
                return Ruling(Verdict.ALLOW)
            if doubt is not None:
                least.append(Ruling(Verdict.PROMPT, doubt))
        elif (fitting := part.touched_by(rule)) is not None:
            return _strictest([fitting, *least])
    doubt = least[0].reason if least else part.doubt
    return _strictest([*least, Ruling(base, "" if base is Verdict.ALLOW else doubt)])


class _Part(Protocol):
    @property
    def doubt(self) -> str:
        """Why no allow rule can cover the part, or "" when one could."""

    def covered_by(self, rule: ApprovalRule) -> str | None:
        """Return "" when an allow rule covers the part for certain, why it would but for a doubt, or None."""

    def touched_by(self, rule: ApprovalRule) -> Ruling | None:
        """Return the ruling when a forbid or prompt rule may be about the part, or None."""


def _parts(arguments: dict[str, JsonValue], rule: ApprovalRule) -> list[_Part]:
    if rule.command:
        return list(_shell_parts(arguments))
    if rule.path:
        return _patch_parts(arguments.get("patch"))
    return [_Arguments(arguments)]


def _arguments(call: ToolCall) -> dict[str, JsonValue] | None:
    if call.arguments.inline is None:
        return None
    try:
        value = json.loads(call.arguments.inline)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _shell_parts(arguments: dict[str, JsonValue]) -> Iterator[_Part]:
    command = arguments.get("command")
    if command is None:
        typed = arguments.get("input")
        yield _Session() if typed is None else _Opaque(str(typed), "what is typed at a session is never covered by a rule")
        return
    try:
        for pipeline in read_pipelines(str(command)):
            yield from (_Simple(one, pipeline[:place]) for place, one in enumerate(pipeline))
    except Unreadable as unreadable:
        yield _Opaque(str(command), f"it cannot be read for certain: it has {unreadable}")


@dataclass(frozen=True)
class _Session:
    """Waiting for, resizing or ending a session. What runs there was decided on when it was started."""

    doubt: str = ""

    def covered_by(self, rule: ApprovalRule) -> str | None:
        return ""

    def touched_by(self, rule: ApprovalRule) -> Ruling | None:
        return None


@dataclass(frozen=True)
class _Opaque:
    """A text for bash, or for a program at a terminal, whose meaning is not certain."""

    text: str
    doubt: str

    def covered_by(self, rule: ApprovalRule) -> str | None:
        return None

    def touched_by(self, rule: ApprovalRule) -> Ruling | None:
        for pattern in rule.command_words:
            program = pattern[0].rsplit("/", 1)[-1]
            if mentions(self.text, program):
                reasons = (rule.reason.rstrip("."), f"{self.doubt}, and it names {program}")
                return Ruling(rule.verdict, "; ".join(filter(None, reasons)))
        return None


@dataclass(frozen=True)
class _Simple:
    """One program with its arguments, and the commands before it in its pipeline, which may write what it runs."""

    command: SimpleCommand
    piped: tuple[SimpleCommand, ...] = ()
    doubt: str = ""

    @cached_property
    def runs_others(self) -> bool:
        """Whether it may run another program."""
        return danger_of(self.command) is not None

    def covered_by(self, rule: ApprovalRule) -> str | None:
        doubts = []
        for pattern in rule.command_words:
            written = _written_out(pattern, self.command)
            if written is not None:
                doubts.append(danger_of(self.command, written) or "")
        return None if not doubts else "" if "" in doubts else doubts[0]

    def touched_by(self, rule: ApprovalRule) -> Ruling | None:
        for pattern in rule.command_words:
            if _may_be(pattern, self.command) or (self.runs_others and self._may_run(pattern)):
                return Ruling(rule.verdict, rule.reason)
        return None

    def _may_run(self, pattern: Sequence[str]) -> bool:
        """Return whether a command that may run others may run what a pattern is about: its arguments or its input name it."""
        if _names(pattern, self.command):
            return True
        program = pattern[0].rsplit("/", 1)[-1]
        return runs_input(self.command) and any(mentions(_text_of(one), program) for one in self.piped)


def _written_out(pattern: Sequence[str], command: SimpleCommand) -> frozenset[int] | None:
    """Return the places of the words that a pattern spells out when it covers the command for certain, or None."""
    exact = pattern[-1] == "$"
    wanted = pattern[:-1] if exact else pattern
    if len(command) < len(wanted) or (exact and len(command) > len(wanted)):
        return None
    for want, word in zip(wanted, command, strict=False):
        if word.glob or want not in ("*", word.text):
            return None
    return frozenset(place for place, want in enumerate(wanted) if want != "*")


def _may_be(pattern: Sequence[str], command: SimpleCommand) -> bool:
    """Return whether a command may be what a pattern is about, wherever its program is, with options before the other words."""
    program, *wanted = pattern
    name = command[0].text.rsplit("/", 1)[-1]
    if program not in (command[0].text, name, program_of(command)) and not same_program(program, name):
        return False
    exact = wanted[-1:] == ["$"]
    wanted = wanted[:-1] if exact else wanted
    words = command[1:]
    if words and (words[0].text.startswith("-") or words[0].glob):
        rest = iter(words)
        return all(any(word.glob or want in ("*", word.text) for word in rest) for want in wanted)
    if exact and len(words) > len(wanted) and not any(word.glob for word in words):
        return False
    if len(words) < len(wanted):
        return any(word.glob for word in words)
    return all(word.glob or want in ("*", word.text) for want, word in zip(wanted, words, strict=False))


def _names(pattern: Sequence[str], command: SimpleCommand) -> bool:
    """Return whether the arguments of a command name what a pattern is about."""
    program, *wanted = pattern
    name = program.rsplit("/", 1)[-1]
    arguments = _text_of(command[1:])
    if mentions(arguments, name) or (program_of(command) == "sed" and mentions_after_e(arguments, name)):
        return True
    named = [word for word in wanted if word not in ("*", "$")]
    return program_of(command) == program and bool(named) and all(mentions(arguments, word) for word in named)


def _text_of(words: Sequence[Word]) -> str:
    return " ".join(word.text for word in words)


_FILE_MARKER = re.compile(r"\*\*\*\s*(?:add file|update file|delete file|move to)\s*:", re.I)
"""The lines of a V4A patch that name files, read as loosely as `apply_patch` itself reads them."""


def _patch_parts(patch: JsonValue) -> list[_Part]:
    parts: list[_Part] = []
    for line in str(patch).removeprefix("\ufeff").split("\n"):
        marker = _FILE_MARKER.match(line)
        if marker is not None:
            path = line[marker.end() :].strip()
            parts.append(_File(path.rstrip("*").rstrip() if path.endswith("***") else path))
    return parts or [_File("")]


@dataclass(frozen=True)
class _File:
    """A file that a patch names, as it is written there. Patches go through no link, so the name says which file it is."""

    written: str

    @property
    def path(self) -> str | None:
        """The path in its normal form, or None when it names no file of the workspace."""
        inside = f"{WORKSPACE}/"
        try:
            written = self.written
            return check_workspace_path(written.removeprefix(inside).lstrip("/") if written.startswith(inside) else written)
        except ValueError:
            return None

    @property
    def doubt(self) -> str:
        return "" if self.path is not None else f"{self.written!r:.80} names no file of the workspace"

    def covered_by(self, rule: ApprovalRule) -> str | None:
        return "" if self.path is not None and any(_path_glob(glob).fullmatch(self.path) for glob in rule.path) else None

    def touched_by(self, rule: ApprovalRule) -> Ruling | None:
        if self.path is None:
            return Ruling(rule.verdict, self.doubt)
        return Ruling(rule.verdict, rule.reason) if self.covered_by(rule) == "" else None


@lru_cache(maxsize=MAX_PATTERNS)
def _path_glob(glob: str) -> re.Pattern[str]:
    """Return the expression for a glob of paths: `*` and `?` stay within a part, `**` as a whole part is any number of them."""
    translated = ""
    parts = [part for part in glob.split("/") if part not in ("", ".")]
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            translated += ".+" if last else "(?:.+/)?"
        else:
            translated += _glob(part, "[^/]") + ("" if last else "/")
    return re.compile(translated, re.S)


def _glob(glob: str, character: str) -> str:
    """Return the expression for a glob. What lies between two stars is found where it first stands, so that none takes long."""
    first, *rest = (_fixed(part, character) for part in glob.split("*"))
    if not rest:
        return first
    between = "".join(f"(?>{character}*?{part})" for part in rest[:-1] if part)
    return f"{first}{between}{character}*{rest[-1]}"


def _fixed(text: str, character: str) -> str:
    return "".join(character if char == "?" else re.escape(char) for char in text)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of an activity tool."""

    given: dict[str, JsonValue]
    doubt: str = ""

    def covered_by(self, rule: ApprovalRule) -> str | None:
        return "" if self._fits(rule, _equals) else None

    def touched_by(self, rule: ApprovalRule) -> Ruling | None:
        return Ruling(rule.verdict, rule.reason) if self._fits(rule, _holds) else None

    def _fits(self, rule: ApprovalRule, test: Callable[[object, JsonValue], bool]) -> bool:
        return all(
            field in self.given
            and any(test(pattern, self.given[field]) for pattern in (patterns if isinstance(patterns, tuple) else (patterns,)))
            for field, patterns in rule.arguments.items()
        )


def _equals(pattern: object, value: JsonValue) -> bool:
    """Return whether a value is for certain what a pattern says. A `*` takes no control characters, which hide what follows."""
    if isinstance(pattern, str) and isinstance(value, str):
        return re.fullmatch(_glob(pattern, r"[^\x00-\x1f\x7f]"), value) is not None
    return not isinstance(value, (str, list, dict)) and isinstance(pattern, bool) == isinstance(value, bool) and pattern == value


def _holds(pattern: object, value: JsonValue) -> bool:
    """Return whether a value, or anything in it, may be what a pattern says, also when it is written as text."""
    if isinstance(value, dict):
        return any(_holds(pattern, inner) for inner in value.values()) or any(_holds(pattern, name) for name in value)
    if isinstance(value, list):
        return any(_holds(pattern, inner) for inner in value)
    if _equals(pattern, value):
        return True
    wanted = pattern if isinstance(pattern, str) else re.escape(json.dumps(pattern))
    text = value if isinstance(value, str) else json.dumps(value)
    return re.fullmatch(_glob(wanted, ".") if isinstance(pattern, str) else wanted, text, re.S) is not None
