"""Finding the skills in a workspace: every directory with a SKILL.md below those that an agent names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from activities.tools.skills import MAX_SKILL_BYTES, SKILL_FILE, Skill, SkillFault, read_skill
from activities.tools.workspace_tree import LeadsOut, Place, WorkspaceTree
from activities.workspace.names import printable, readable
from activities.workspace.tree import FILE, Directory, Entry

MAX_SKILLS = 200
MAX_DIRECTORIES = 2000
"""Directories that are looked into, all together."""
MAX_DEPTH = 4
"""Levels below a directory that an agent names: skills may be sorted into groups."""
MAX_BODIES = 4 << 20
"""Bytes of all skills together."""
_PASSED_OVER = frozenset((b".git", b"node_modules"))


@dataclass
class Found:
    """Skills in the order of precedence, what is wrong, for people, and which named directories are not there."""

    skills: list[Skill] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


async def find_skills(tree: WorkspaceTree, places: Sequence[str]) -> Found:
    """Return the skills below `places`, in the order in which they are given, and in each in the order of names.

    Of two skills with one name the first counts. What links lead to is taken where it is met first, and once. Raises StoreError.
    """
    scan = _Scan(tree)
    for place in places:
        await scan.place(place)
    scan.found.faults += [f"{place}: there is no such directory" for place in scan.found.missing]
    scan.found.skills = list(scan.named.values())
    return scan.found


class _Scan:
    def __init__(self, tree: WorkspaceTree) -> None:
        self._tree = tree
        self._seen: set[Place] = set()
        self._files: set[Place] = set()
        self._bytes = 0
        self._is_full = False
        self.named: dict[str, Skill] = {}
        self.found = Found()

    async def place(self, place: str) -> None:
        parts = tuple(place.encode().split(b"/"))
        try:
            there = await self._tree.find(*parts)
        except LeadsOut as error:
            self.found.faults.append(f"{place}: {error}; name a directory of the workspace")
            return
        if there is None or not isinstance(there[1], Directory):
            self.found.missing.append(place)
            return
        await self._look(parts, there[0], there[1], MAX_DEPTH)

    async def _look(self, path: Place, real: Place, directory: Directory, levels: int) -> None:
        """Take a directory's skill, or look into those in it. `path` is how it was reached, `real` where it is."""
        if real in self._seen or self._is_full:
            return
        self._seen.add(real)
        if len(self._seen) > MAX_DIRECTORIES:
            self._stop(f"{_shown(path)}: more than {MAX_DIRECTORIES} directories to look into; name those that hold skills alone")
            return
        names = await self._tree.names(directory)
        if SKILL_FILE.encode() in names:
            await self._take(path)
            return
        if (other := next((name for name in names if name.lower() == b"skill.md"), None)) is not None:
            self._fault(path, f"has a {other.decode(errors='replace')}; call it {SKILL_FILE}")
        for name in names:
            if name in _PASSED_OVER:
                continue
            below = (*path, name)
            try:
                there = await self._tree.find(*below)
            except LeadsOut as error:
                self._fault(below, f"{error}; it is not followed")
                continue
            if there is None or not isinstance(there[1], Directory):
                continue
            if levels == 0:
                self._fault(path, f"holds directories {MAX_DEPTH} levels below; skills there are not looked for")
                return
            await self._look(below, there[0], there[1], levels - 1)

    async def _take(self, path: Place) -> None:
        try:
            there = await self._tree.find(*path, SKILL_FILE.encode())
        except LeadsOut as error:
            self._fault((*path, SKILL_FILE.encode()), f"{error}; put the file itself there")
            return
        if there is None or not isinstance(there[1], Entry) or there[1].kind != FILE:
            self._fault((*path, SKILL_FILE.encode()), "is no regular file, and no link to one; put a file there")
            return
        if there[0] in self._files:
            return
        self._files.add(there[0])
        entry = there[1]
        if entry.size > MAX_SKILL_BYTES:
            remedy = f"more than {MAX_SKILL_BYTES}; move parts of it to files beside it"
            self._fault((*path, SKILL_FILE.encode()), f"has {entry.size} bytes, {remedy}")
            return
        self._bytes += entry.size
        if len(self.named) >= MAX_SKILLS or self._bytes > MAX_BODIES:
            self._stop(
                f"{_shown(path)}: more than {MAX_SKILLS} skills, or {MAX_BODIES} bytes; this one and those after it are left out"
            )
            return
        try:
            skill = read_skill(await self._tree.read(entry, MAX_SKILL_BYTES), _shown(path))
        except SkillFault as fault:
            self.found.faults.append(str(fault))
            return
        self.found.faults += skill.warnings
        first = self.named.setdefault(skill.name, skill)
        if first is not skill:
            self._fault(path, f"is another skill named {skill.name!r}, as is {first.directory}, which counts; rename one")

    def _fault(self, path: Place, what: str) -> None:
        self.found.faults.append(f"{_shown(path)}: {what}")

    def _stop(self, why: str) -> None:
        if not self._is_full:
            self._is_full = True
            self.found.faults.append(why)


def _shown(path: Place) -> str:
    return printable(readable(b"/".join(path).decode("utf-8", "surrogateescape")), 400)
