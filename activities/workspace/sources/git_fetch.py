"""Getting one commit from a server into the bare repository, by a branch, a tag, or its name."""

from __future__ import annotations

import re

from activities.workspace.sources.git_access import GitReach, Key, Remote, Token, way_to
from activities.workspace.sources.git_process import Git, GitFailed, raise_fault
from activities.workspace.sources.git_tree import ref_fault
from activities.workspace.sources.port import TIME_OF_NO_FILE, SourceChanged
from contracts.base import BadInput

_FULL = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.IGNORECASE)
_SHORT = re.compile(r"[0-9a-f]{4,63}", re.IGNORECASE)
_MOST_ANSWER = 64 << 20
_REFS_ONLY = re.compile(r"unadvertised object", re.IGNORECASE)
_NOT_THERE = re.compile(r"not our ref|no such remote ref|couldn't find remote ref", re.IGNORECASE)
_SHOWN_REFS, _SHOWN_NAME = 10, 80
_ZIP_FROM, _ZIP_UNTIL = 315_532_800, 4_354_819_200
"""1980 and 2108, between which zip archives can hold a time."""


class _RefsOnly(Exception):
    """The server gives out what a ref names, and nothing else."""


class _NotThere(Exception):
    """The server does not have what was asked for."""


def time_of(commit: bytes) -> int:
    """Return a commit's time in nanoseconds, for every file: git keeps none for each, and this one is the same for everybody."""
    found = re.search(rb"^committer .*> (\d{1,15}) [+-]\d+$", commit.partition(b"\n\n")[0], re.MULTILINE)
    seconds = int(found[1]) if found else 0
    return seconds * 1_000_000_000 if _ZIP_FROM <= seconds < _ZIP_UNTIL else TIME_OF_NO_FILE


class GitFetch:
    """Fetches commits. Raises BadInput, and StoreUnavailable for what may go well another time."""

    def __init__(self, git: Git, credential: Token | Key | None, reach: GitReach, quiet_seconds: int) -> None:
        self._git = git
        self._credential = credential
        self._reach = reach
        self._quiet_seconds = quiet_seconds
        self._kept = 0

    def entry(self, remote: Remote, ref: str, expected: str) -> str:
        """Fetch what a ref names now, or exactly `expected` if that is not empty, and return the commit.

        Raises SourceChanged when the server no longer has it.
        """
        if expected:
            commit = self.commit(remote, expected) if _FULL.fullmatch(expected) else None
            if commit != expected.lower():
                raise SourceChanged(
                    f"{remote.url}: the pinned commit {expected!r} is not there any more; run without pins to take {ref!r}"
                )
            return commit
        if _FULL.fullmatch(ref):
            found = self.commit(remote, ref)
            if found is None:
                raise BadInput(f"ref: {remote.url} has no commit {ref} that it gives out; correct it, or name a branch or tag")
            return found
        fault = ref_fault(ref)
        if fault is not None:
            raise BadInput(f"ref: {ref!r}: {fault}")
        name, value = self._resolve(remote, ref)
        self._prepare(value)
        try:
            found = self._fetch(remote, name)
        except _NotThere:
            raise SourceChanged(f"ref: {ref!r} of {remote.url} went away while it was fetched; try again") from None
        if found is None:
            raise BadInput(f"ref: {ref!r} of {remote.url} names no commit; name a branch, or a tag of a commit")
        return found

    def commit(self, remote: Remote, name: str) -> str | None:
        """Fetch a commit by its full name, also from a server that gives out refs only. Return None where there is none."""
        name = name.lower()
        self._prepare(name)
        try:
            return self._fetch(remote, name)
        except _NotThere:
            return None
        except _RefsOnly:
            # With their histories, so that the commit is found wherever it lies on them.
            self._run(remote, "+refs/heads/*:refs/caisson/heads/*", "+refs/tags/*:refs/caisson/tags/*")
            return self._commit_of(name)

    def _resolve(self, remote: Remote, ref: str) -> tuple[str, str]:
        """Return a ref's full name and value, as the server has it."""
        names = [ref] if ref == "HEAD" or ref.startswith("refs/") else [f"refs/heads/{ref}", f"refs/tags/{ref}"]
        # Tags that are objects of their own are listed a second time with ^{}, which stands for the commit.
        refs = self._refs(remote, *(form for name in names for form in (name, name + "^{}")))
        found = {name: refs.get(name + "^{}", refs[name]) for name in names if name in refs}
        if not found:
            raise BadInput(f"ref: {self._why_unknown(remote, ref)}")
        if len(set(found.values())) > 1:
            raise BadInput(f"ref: {ref!r} is a branch and also a tag, of different commits; say {' or '.join(found)}")
        return next(iter(found.items()))

    def _why_unknown(self, remote: Remote, ref: str) -> str:
        every = self._refs(remote)
        if not every:
            return f"{remote.url} is empty: it has no commit yet"
        if _SHORT.fullmatch(ref):
            return f"{ref!r} is no branch or tag of {remote.url}; give a commit in full, all 40 digits (git rev-parse {ref})"
        names = [name.removeprefix("refs/heads/") for name in every if name.startswith("refs/heads/")]
        some = ", ".join(repr(name[:_SHOWN_NAME]) for name in names[:_SHOWN_REFS]) + (", ..." if len(names) > _SHOWN_REFS else "")
        return f"{remote.url} has no branch or tag {ref!r}; its branches are {some or 'none'}"

    def _refs(self, remote: Remote, *names: str) -> dict[str, str]:
        try:
            answer = self._talk(remote, "ls-remote", "--quiet", "--", remote.url, *names, most=_MOST_ANSWER)
        except GitFailed as error:
            raise_fault(remote, error)
        lines = (line.split("\t") for line in answer.decode(errors="replace").splitlines())
        return {parts[1]: parts[0] for parts in lines if len(parts) == 2 and _FULL.fullmatch(parts[0])}

    def _prepare(self, name: str) -> None:
        self._git.prepare("sha1" if len(name) == 40 else "sha256")

    def _fetch(self, remote: Remote, name: str) -> str | None:
        """Fetch what `name` is, alone, and return its commit, or None when it is none."""
        self._kept += 1
        kept = f"refs/caisson/{self._kept}"
        self._run(remote, "--depth=1", f"+{name}:{kept}")
        return self._commit_of(kept)

    def _run(self, remote: Remote, *what: str) -> None:
        options = [word for word in what if word.startswith("--")]
        quiet = ("--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", "--no-auto-maintenance")
        try:
            self._talk(remote, "fetch", *quiet, *options, "--", remote.url, *(word for word in what if word not in options))
        except GitFailed as error:
            if _REFS_ONLY.search(str(error)):
                raise _RefsOnly from None
            if _NOT_THERE.search(str(error)):
                raise _NotThere from None
            raise_fault(remote, error)

    def _talk(self, remote: Remote, *arguments: str, most: int = 1 << 20) -> bytes:
        with way_to(remote, self._credential, self._reach, self._quiet_seconds) as way:
            return self._git.run(*arguments, way=way, most=most)

    def _commit_of(self, name: str) -> str | None:
        try:
            return self._git.run("rev-parse", "--verify", "--quiet", "--end-of-options", name + "^{commit}").decode().strip()
        except GitFailed:
            return None
