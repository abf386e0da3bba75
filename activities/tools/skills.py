"""One skill: reading a SKILL.md.

The format is that of Agent Skills (https://agentskills.io/specification): YAML between two lines of three dashes, then Markdown.
It is read as people write it: a byte order mark, any line endings and unknown fields are no fault. What cannot be used is told
with the file and, where there is one, the line.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Any

import yaml

from activities.plain_yaml import parse_yaml
from activities.workspace.names import printable

SKILL_FILE = "SKILL.md"
MAX_SKILL_BYTES = 128 * 1024
"""Of one SKILL.md. The model is given all of it when it loads the skill; longer texts belong in files beside it."""
MAX_NAME = 64
MAX_DESCRIPTION = 1024
"""Characters, as the specification has it."""

_SPECIFIED = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_NAME = re.compile(r"\w(?:[\w.-]*\w)?")
_FENCE = re.compile(r"---[ \t]*")


@dataclass(frozen=True)
class Skill:
    """One skill. `directory` is its place in the workspace, `body` is what follows the front matter."""

    name: str
    description: str
    directory: str
    body: str
    license: str = ""
    warnings: tuple[str, ...] = ()


class SkillFault(ValueError):
    """A skill that cannot be used. The message has the file, the line if it is known, and what to do."""


def read_skill(data: bytes, directory: str) -> Skill:
    """Return the skill whose SKILL.md in `directory` holds `data`. Raises SkillFault."""
    file = f"{directory}/{SKILL_FILE}"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SkillFault(f"{file}:{line}: is not UTF-8 text; save it as UTF-8") from None
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not any(line.strip() for line in lines):
        raise SkillFault(f"{file}: is empty; begin it with front matter: a line ---, name, description, and a line ---")
    if not _FENCE.fullmatch(lines[0]):
        raise SkillFault(f"{file}:1: has no front matter; its first line must be ---, then come name and description")
    end = next((number for number, line in enumerate(lines[1:], 1) if _FENCE.fullmatch(line)), None)
    if end is None:
        raise SkillFault(f"{file}:1: its front matter does not end; write a line --- after name and description")
    fields = _front_matter(file, "\n" + "\n".join(lines[1:end]))
    base = directory.rsplit("/", 1)[-1]
    name, warnings = _name(file, fields, base)
    description, more = _description(file, fields)
    return Skill(
        name=name,
        description=description,
        directory=directory,
        body="\n".join(lines[end + 1 :]).strip("\n"),
        license=str(fields.get("license") or ""),
        warnings=(*warnings, *more),
    )


def _front_matter(file: str, text: str) -> dict[str, Any]:
    """Return the fields. `text` has a line for the one of dashes, so that lines are counted as in the file."""
    try:
        fields = parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        what = printable(error.problem or error.context or "it cannot be read", 200)
        raise SkillFault(f"{file}{line}: is not YAML: {what}; put text with ': ', '#' or other signs in quotes") from None
    except yaml.YAMLError as error:
        raise SkillFault(f"{file}: is not YAML: {printable(str(error), 200)}; write plain text there") from None
    except RecursionError:
        raise SkillFault(f"{file}: nests too deeply; write it with fewer levels") from None
    except ValueError as error:
        line, _, what = str(error).removeprefix("line ").partition(": ")
        raise SkillFault(
            f"{file}:{line}: {printable(what, 300)}" if line.isdecimal() else f"{file}: {printable(str(error), 300)}"
        ) from None
    if not isinstance(fields, dict):
        raise SkillFault(f"{file}:2: its front matter must be fields: name: ... and description: ..., each on a line")
    return fields


def _name(file: str, fields: dict[str, Any], base: str) -> tuple[str, list[str]]:
    given = fields.get("name", base)
    if not isinstance(given, str):
        raise SkillFault(f"{file}: name is {printable(str(given), 60)!r} and no text; put it in quotes")
    name = unicodedata.normalize("NFC", given.strip())
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise SkillFault(
            f"{file}: name {printable(given, 80)!r} cannot be used; write up to {MAX_NAME} letters, digits and hyphens: pdf-tools"
        )
    warnings = []
    if "name" not in fields:
        warnings.append(f"{file}: has no name, and goes by that of its directory")
    elif name != unicodedata.normalize("NFC", base):
        warnings.append(f"{file}: is named {name!r} and lies in a directory {printable(base, 80)!r}; give both one name")
    if not _SPECIFIED.fullmatch(name):
        warnings.append(f"{file}: other agents may not take the name {name!r}, which is not of a-z, 0-9 and single hyphens")
    return name, warnings


def _description(file: str, fields: dict[str, Any]) -> tuple[str, list[str]]:
    given = fields.get("description")
    if given is None:
        raise SkillFault(f"{file}: has no description; say in its front matter what the skill does and when to use it")
    if not isinstance(given, str):
        raise SkillFault(f"{file}: description is {printable(str(given), 60)!r} and no text; put it in quotes")
    if not given.strip():
        raise SkillFault(f"{file}: its description is blank; say what the skill does and when to use it")
    text = "\n".join(printable(line, MAX_SKILL_BYTES) for line in given.strip().split("\n"))
    if len(text) <= MAX_DESCRIPTION:
        return text, []
    warning = f"{file}: its description has {len(text)} characters, of which the model sees the first {MAX_DESCRIPTION}"
    return text[: MAX_DESCRIPTION - 1] + "…", [warning]
