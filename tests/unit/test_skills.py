"""Skills as people write them: what is read, what is told when it cannot be, and that no tree of files holds up a scan."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.store.blobs import BlobStore
from activities.tools.skill_scan import MAX_DIRECTORIES, MAX_SKILLS, Found, find_skills
from activities.tools.skills import MAX_DESCRIPTION, SkillFault, read_skill
from activities.tools.workspace_tree import HostFiles, SnapshotFiles, WorkspaceTree
from tests.snapshot_support import Room

BODY = "\n# Body\n\nUse it.\n"


def skill(name: str = "good", description: str = "A plain valid skill.", more: str = "") -> str:
    """A SKILL.md."""
    return f"---\nname: {name}\ndescription: {description}\n{more}---\n{BODY}"


def put(root: Path, path: str, text: str | bytes) -> None:
    """Write a file."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())


class Shelf:
    """A directory whose skills are looked for in its snapshot."""

    def __init__(self, root: Path) -> None:
        self._room = Room(root)
        self._place = self._room.place()
        self.root = self._place.workspace

    def put(self, path: str, text: str | bytes) -> None:
        """Write a file."""
        put(self.root, path, text)

    async def scan(self, *places: str) -> Found:
        """Look."""
        blobs = BlobStore(self._room.objects)
        snapshot = await SnapshotFiles.open(blobs, await self._room.save(self._place))
        trees: tuple[WorkspaceTree, ...] = snapshot, HostFiles(self.root)
        found, on_host = [await find_skills(tree, places or ("skills",)) for tree in trees]
        assert found == on_host
        return found


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    """An empty one."""
    return Shelf(tmp_path)


async def test_one_bad_skill_costs_no_other(shelf: Shelf) -> None:
    """A colon that YAML reads as something else is told with file and line.

    From openai/codex#8609 and pbakaus/impeccable#102.
    """
    shelf.put("skills/deploy/SKILL.md", skill("deploy", "Use when: deploying or rolling back"))
    shelf.put("skills/good/SKILL.md", skill())
    found = await shelf.scan()
    assert [one.name for one in found.skills] == ["good"]
    (fault,) = found.faults
    assert fault.startswith("skills/deploy/SKILL.md:3: is not YAML: mapping values are not allowed here")
    assert "quotes" in fault


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_byte_order_marks_and_line_endings_are_no_fault(mark: bytes, ending: bytes) -> None:
    """Neither is any part of what is read.

    From crewAIInc/crewAI#7538, bytedance/deer-flow#5588, NousResearch/hermes-agent#65277 and QwenLM/qwen-code#1528.
    """
    one = read_skill(mark + skill("crlf", "Windows endings.").encode().replace(b"\n", ending), "skills/crlf")
    assert (one.name, one.description, one.warnings) == ("crlf", "Windows endings.", ())
    assert one.body == BODY.strip("\n")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (">-\n  First part,\n  second part.\n", "First part, second part."),
        ("|\n  First line.\n  Second line.\n", "First line.\nSecond line."),
        (">\n  Para one.\n\n  Para two: with colon.\n", "Para one.\nPara two: with colon."),
        ("'quoted: it''s'\n", "quoted: it's"),
        ('"a \\"word\\" # not a comment"\n', 'a "word" # not a comment'),
        ("plain # a comment\n", "plain"),
        ("2026-12-01\n", "2026-12-01"),
    ],
)
def test_every_form_of_text_is_read_whole(written: str, read: str) -> None:
    """Never the indicator; and the keys after it are still read.

    From oguzbilgic/kern-ai#318, netease-youdao/LobsterAI#27, context-labs/whip and HKUDS/OpenSpace.
    """
    one = read_skill(f"---\nname: folded\ndescription: {written}license: MIT\n---\n{BODY}".encode(), "skills/folded")
    assert (one.description, one.license) == (read, "MIT")


async def test_links_are_followed_once_and_never_out(shelf: Shelf) -> None:
    """A linked directory, a linked file, a circle, and ways out. From openai/codex#31592, #15756 and #11314."""
    shelf.put("real/linked/SKILL.md", skill("linked"))
    shelf.put("real/target.md", skill("filelink"))
    shelf.put("skills/plain/SKILL.md", skill("plain"))
    for name, target in (
        ("linked", "../real/linked"),
        ("again", "/workspace/real/linked"),
        ("loop", ".."),
        ("self", "."),
        ("turn", "turn"),
        ("escape", "/etc"),
        ("up", "../../../etc"),
        ("near", "/workspace-of-another"),
        ("nowhere", "../gone"),
    ):
        os.symlink(target, shelf.root / "skills" / name)
    (shelf.root / "skills/filelink").mkdir()
    os.symlink("../../real/target.md", shelf.root / "skills/filelink/SKILL.md")
    (shelf.root / "skills/stolen").mkdir()
    os.symlink("/etc/passwd", shelf.root / "skills/stolen/SKILL.md")
    os.link(shelf.root / "real/target.md", shelf.root / "skills/hard.md")
    began = time.monotonic()
    found = await shelf.scan()
    assert time.monotonic() - began < 2
    assert sorted(one.name for one in found.skills) == ["filelink", "linked", "plain"]
    faults = "\n".join(found.faults)
    for name in ("escape", "up", "near", "stolen/SKILL.md"):
        assert f"skills/{name}: a link leads out of the workspace" in faults
    assert "skills/turn: links lead in a circle" in faults


async def test_of_two_with_one_name_the_first_directory_counts(shelf: Shelf) -> None:
    """The same on every run, and both are named. From AltimateAI/altimate-code#1276 and anthropics/claude-code#89207."""
    for path, body in (("user/skills/fmt", "USER"), ("project/skills/zfmt", "SECOND"), ("project/skills/fmt", "PROJECT")):
        shelf.put(f"{path}/SKILL.md", f"---\nname: fmt\ndescription: Of {body}.\n---\n{body}\n")
    for _ in range(3):
        found = await shelf.scan("project/skills", "user/skills")
        assert [(one.name, one.body) for one in found.skills] == [("fmt", "PROJECT")]
        told = [fault for fault in found.faults if "another skill named 'fmt'" in fault]
        assert [fault.split(":")[0] for fault in told] == ["project/skills/zfmt", "user/skills/fmt"]
        assert all("project/skills/fmt, which counts" in fault for fault in told)
    assert [one.body for one in (await shelf.scan("user/skills", "project/skills")).skills] == ["USER"]


@pytest.mark.parametrize(
    ("directory", "name", "loaded", "warned"),
    [
        ("skills/pdf-tools", "pdf", "pdf", "give both one name"),
        ("skills/übersicht", "übersicht", "übersicht", "other agents may not take"),
        ("skills/u\u0308bersicht", "übersicht", "übersicht", "other agents may not take"),
        ("skills/PDF_Tools", "PDF_Tools", "PDF_Tools", "other agents may not take"),
        ("skills/v1.2", "v1.2", "v1.2", "other agents may not take"),
    ],
)
def test_names_that_differ_are_loaded_with_a_warning(directory: str, name: str, loaded: str, warned: str) -> None:
    """From vercel-labs/agent-skills#80 and agentskills/agentskills#345."""
    one = read_skill(skill(name).encode(), directory)
    assert one.name == loaded
    assert len(one.warnings) == 1 and warned in one.warnings[0] and one.warnings[0].startswith(f"{directory}/SKILL.md: ")


@pytest.mark.parametrize(
    "name", ["two words", "../up", "a/b", "'-'", '"\\x1b[31mred"', '"a\\nb"', "x" * 65, "''", "12", "[a]", "'.'"]
)
def test_names_that_cannot_be_called_are_refused(name: str) -> None:
    """With the reason; a name ends up in a line for the model and in a person's terminal."""
    with pytest.raises(SkillFault, match="name") as told:
        read_skill(skill(name).encode(), "skills/x")
    assert "\x1b" not in str(told.value) and "\n" not in str(told.value)


def test_unknown_fields_are_no_fault() -> None:
    """And a description within another field is not the description. From affaan-m/ECC#2233."""
    more = "metadata:\n  description: nested\n  tags: [a, b]\nallowed-tools: [Bash, Read]\nversion: 1.0\nx-unknown: yes\n"
    text = f"---\nname: extra\n{more}description: The real one.\n---\n{BODY}"
    one = read_skill(text.encode(), "skills/extra")
    assert (one.description, one.warnings) == ("The real one.", ())


async def test_every_broken_file_is_told_once(shelf: Shelf) -> None:
    """And the valid one loads. From MoonshotAI/kimi-code#3673."""
    shelf.put("skills/nodesc/SKILL.md", "---\nname: nodesc\n---\n")
    shelf.put("skills/open/SKILL.md", "---\nname: open\ndescription: never closed\n\n# Body\n")
    shelf.put("skills/empty/SKILL.md", "")
    shelf.put("skills/badutf/SKILL.md", b"---\nname: badutf\ndescription: caf\xe9\n---\n")
    shelf.put("skills/bare/SKILL.md", "# Just text\n")
    shelf.put("skills/list/SKILL.md", "---\n- name\n---\n")
    shelf.put("skills/blank/SKILL.md", skill("blank", "'  '"))
    shelf.put("skills/number/SKILL.md", skill("number", "12"))
    shelf.put("skills/twice/SKILL.md", skill("twice", more="name: twice\n"))
    shelf.put("skills/tagged/SKILL.md", skill("tagged", "!!python/object/apply:os.system [id]"))
    shelf.put("skills/bomb/SKILL.md", skill("bomb", more="a: &a [" + "x," * 300 + "]\nb: [" + "*a," * 300 + "]\n"))
    shelf.put("skills/deep/SKILL.md", skill("deep", more="a: " + "[" * 300 + "]" * 300 + "\n"))
    shelf.put("skills/large/SKILL.md", skill("large") + "x" * 200_000)
    shelf.put("skills/lower/skill.md", skill("lower"))
    shelf.put("skills/nofile/README.md", "no skill here")
    (shelf.root / "skills/folder/SKILL.md").mkdir(parents=True)
    shelf.put("skills/good/SKILL.md", skill())
    found = await shelf.scan()
    assert [one.name for one in found.skills] == ["good"]
    broken = ["nodesc", "open", "empty", "badutf", "bare", "list", "blank", "number"]
    broken += ["twice", "tagged", "bomb", "deep", "large", "lower", "folder"]
    for name in broken:
        assert len([fault for fault in found.faults if fault.startswith((f"skills/{name}/", f"skills/{name}:"))]) == 1, name
    assert len(found.faults) == len(broken)
    told = {fault.split("/")[1].split(":")[0]: fault for fault in found.faults}
    assert told["badutf"].startswith("skills/badutf/SKILL.md:3:")
    assert told["twice"].startswith("skills/twice/SKILL.md:4:")


async def test_a_directory_may_be_a_skill_and_skills_may_be_in_groups(shelf: Shelf) -> None:
    """What lies within a skill is no further skill; versions and packages are passed over."""
    shelf.put("one/SKILL.md", skill("one"))
    shelf.put("one/examples/SKILL.md", skill("example"))
    shelf.put("skills/office/pdf/SKILL.md", skill("pdf"))
    shelf.put("skills/node_modules/x/SKILL.md", skill("x"))
    found = await shelf.scan("one", "skills", "gone")
    assert [one.name for one in found.skills] == ["one", "pdf"]
    assert (found.missing, found.faults) == (["gone"], ["gone: there is no such directory"])


async def test_no_tree_is_too_large_to_be_left_off(shelf: Shelf) -> None:
    """The number of skills, directories and levels is bounded, and what is left out is told."""
    for number in range(MAX_SKILLS + 5):
        shelf.put(f"many/s{number:03}/SKILL.md", skill(f"s{number:03}"))
    for number in range(MAX_DIRECTORIES + 5):
        (shelf.root / f"wide/d{number}").mkdir(parents=True)
    shelf.put("deep/a/b/c/d/e/SKILL.md", skill("deep"))
    many, wide, deep = await shelf.scan("many"), await shelf.scan("wide"), await shelf.scan("deep")
    assert len(many.skills) == MAX_SKILLS and len(many.faults) == 1 and "left out" in many.faults[0]
    assert len(wide.faults) == 1 and f"more than {MAX_DIRECTORIES} directories" in wide.faults[0]
    assert deep.faults == ["deep/a/b/c/d: holds directories 4 levels below; skills there are not looked for"]


def test_a_long_description_is_cut_and_told() -> None:
    """As the specification bounds it."""
    one = read_skill(skill("long", "x" * 3000).encode(), "skills/long")
    assert len(one.description) == MAX_DESCRIPTION
    assert "3000 characters" in one.warnings[0]


@given(st.binary(max_size=400) | st.text(max_size=300).map(lambda text: f"---\n{text}\n---\n".encode("utf-8", "surrogatepass")))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    """A skill, or a fault in one line."""
    try:
        one = read_skill(data, "skills/any")
    except SkillFault as fault:
        assert "\n" not in str(fault) and str(fault).startswith("skills/any/SKILL.md")
    else:
        assert one.name and all(line.isprintable() for line in one.description.split("\n"))
