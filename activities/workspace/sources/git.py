"""A git repository as a source: the files of one commit, read by the harness with the `git` program, and never checked out.

    find:   ask for the ref -> fetch that one commit (shallow) -> list its tree with sizes -> submodules, in the same way -> links
    open:   one `git cat-file --batch` gives the contents

What the repository holds is hostile. Its names, links and submodules are judged in `git_tree`; nothing of it is ever run or
configures git, and there is no work tree that git could write to. The sandbox gets neither the repository nor the credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from activities.workspace.ingest import Content
from activities.workspace.sources.git_access import GitReach, Remote, parse_remote, parse_secret, scrubber
from activities.workspace.sources.git_fetch import GitFetch, time_of
from activities.workspace.sources.git_process import Git, GitFailed, GitLimits, Objects
from activities.workspace.sources.git_tree import (
    MOST_PATH,
    Module,
    Row,
    join,
    judge_row,
    link_fault,
    module_remote,
    parse_modules,
    parse_row,
    shown,
)
from activities.workspace.sources.port import DIRECTORIES_FOR_A_FILE, TIME_OF_NO_FILE, Found
from contracts.base import BadInput
from contracts.manifest import GitEntry

MOST_MODULES, MOST_MODULE_DEPTH = 200, 5
_IN_MEMORY = 8 << 20
"""Larger files wait on the disk until they have been read."""
_MOST_COMMIT, _MOST_GITMODULES = 16 << 20, 1 << 20
_POINTER, _MOST_POINTER = b"version https://git-lfs.github.com/spec/v1\n", 1024
"""https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md"""
_SHOWN_REFS = 10


class GitSource:
    """One commit's files (see Source). `scratch` is a directory for it alone, which `close` removes.

    `expected` is the commit that an earlier run was given: exactly that one is fetched, wherever the ref is now, and
    SourceChanged says that the server has it no more. `is_wanted` tells of a path whether the entry selects it: a link that leads
    out of the entry's files is refused, unless nobody wants it.
    """

    def __init__(
        self,
        entry: GitEntry,
        secret: str | None,
        scratch: Path,
        *,
        reach: GitReach | None = None,
        limits: GitLimits | None = None,
        expected: str = "",
        is_wanted: Callable[[str], bool] = lambda path: True,
    ) -> None:
        self._entry = entry
        self._reach = reach or GitReach()
        self._limits = limits or GitLimits()
        self._expected = expected
        self._is_wanted = is_wanted
        self._scratch = scratch
        self._remote = parse_remote(entry.url, self._reach)
        self._credential = parse_secret(self._remote.scheme, secret)
        self._git = Git(scratch, self._limits, scrubber(self._credential))
        self._fetch = GitFetch(self._git, self._credential, self._reach, self._limits.quiet_seconds)
        self._objects = Objects(self._git)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="git")
        self._work: Future[list[Found]] | None = None
        self._pin = ""
        self._time = TIME_OF_NO_FILE
        self._found: list[Found] = []
        self._links: dict[bytes, bytes] = {}
        self._files = self._directories = self._fetched = self._most_files = 0
        self._without: list[str] = []
        self._pointers = 0

    async def find(self, most_files: int) -> list[Found]:
        """See Source."""
        self._work = self._thread.submit(self._find, most_files)
        try:
            # Cancelled, the thread goes on for the moment that it takes to see its git killed; `close` waits for that.
            return await asyncio.wrap_future(self._work)
        except asyncio.CancelledError:
            self._git.stop()
            raise

    def pin(self) -> str:
        """The commit."""
        return self._pin

    def notes(self) -> list[str]:
        """Return what a person should know of what was given, once it has been read: submodules left out, pointers of Git LFS."""
        notes = []
        if self._without:
            some = ", ".join(self._without[:_SHOWN_REFS]) + (", ..." if len(self._without) > _SHOWN_REFS else "")
            notes.append(f"{len(self._without)} submodules are empty directories: {some}")
        if self._pointers:
            notes.append(f"{self._pointers} files are pointers of Git LFS, not the content that they stand for")
        return notes

    async def close(self) -> None:
        """See Source. Whatever still runs is killed."""
        self._git.stop()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._objects.close()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._scratch)

    def _find(self, most_files: int) -> list[Found]:
        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._most_files = most_files
        try:
            self._pin = self._fetch.entry(self._remote, self._entry.ref, self._expected)
            self._time = time_of(self._objects.read(self._pin, _MOST_COMMIT, "commit"))
            self._list(self._remote, self._pin, b"", (self._entry.subpath or "").encode(), b"", 0)
        except GitFailed as error:
            # Talking to the server is over, or has its own errors: this is about what came from it.
            raise BadInput(f"{self._remote.url}: git cannot read what the repository has ({str(error)[-300:]})") from None
        self._judge_links()
        return sorted(self._found, key=lambda found: os.fsencode(found.path))

    # Listing

    def _list(self, remote: Remote, commit: str, place: bytes, subpath: bytes, prefix: bytes, depth: int) -> None:
        """Add what a commit has below `subpath` to what was found, at `place`. `prefix` is where a submodule is in the whole."""
        tree = commit
        if subpath:
            rows = self._rows("--full-tree", commit, "--", os.fsdecode(subpath))
            top = next((row for row in rows if row.path == subpath), None)
            if top is None:
                raise BadInput(f"subpath: {shown(subpath)} is not in {remote.url} at {commit}; correct it (case counts)")
            if top.kind == "commit":
                self._module(remote, self._modules(commit), top, place, subpath, prefix, depth)
                return
            if top.is_link:
                raise BadInput(f"subpath: {shown(subpath)} is a symbolic link in the repository; name what it leads to")
            if top.kind == "blob":
                self._file(top, place, subpath)
                return
            tree = top.name
        rows = self._rows("-r", "-t", "--full-tree", tree, judge=functools.partial(self._judge, place, {b"": True}))
        self._directory(place, join(prefix, subpath))
        modules: dict[bytes, Module] | None = None
        for row in rows:
            path, name = join(place, row.path), join(subpath, row.path)
            if row.kind == "tree":
                self._directory(path, join(prefix, name), row.name)
            elif row.kind == "blob":
                self._file(row, path, join(prefix, name))
            else:
                modules = self._modules(commit) if modules is None else modules
                self._module(remote, modules, row, path, name, prefix, depth)

    def _directory(self, path: bytes, name: bytes, version: str = "") -> None:
        self._found.append(Found(os.fsdecode(path), os.fsdecode(name), version))

    def _rows(self, *arguments: str, judge: Callable[[Row], None] | None = None) -> list[Row]:
        """List a tree. What `judge` raises ends it at once."""
        rows: list[Row] = []
        rest = b""

        def take(data: bytes) -> None:
            nonlocal rest
            *lines, rest = (rest + data).split(b"\0")
            for line in lines:
                row = parse_row(line)
                if judge is not None:
                    judge(row)
                rows.append(row)

        self._git.stream(take, "ls-tree", "-z", "-l", *arguments)
        return rows

    def _judge(self, place: bytes, seen: dict[bytes, bool], row: Row) -> None:
        judge_row(row, join(place, row.path), seen)
        self._files += row.kind == "blob"
        self._directories += row.kind != "blob"
        if self._files > self._most_files:
            raise BadInput(f"more than {self._most_files} files; raise max_files, or name a subpath with fewer")
        most = (self._most_files + 1) * DIRECTORIES_FOR_A_FILE
        if self._directories > most:
            raise BadInput(f"more than {most} directories for at most {self._most_files} files; name a subpath with fewer")

    def _file(self, row: Row, path: bytes, name: bytes) -> None:
        if row.is_link:
            if row.size > MOST_PATH:
                raise BadInput(f"{shown(name)} is a symbolic link of {row.size} bytes, more than any system has; leave it out")
            target = self._objects.read(row.name, MOST_PATH)
            if not target or b"\0" in target:
                raise BadInput(f"{shown(name)} is a symbolic link to nothing, or with a NUL in it; remove it from the repository")
            self._links[path] = target
            self._found.append(Found(os.fsdecode(path), os.fsdecode(name), row.name, mtime=self._time, target=target))
            return
        opens = functools.partial(self._open, row)
        self._found.append(
            Found(os.fsdecode(path), os.fsdecode(name), row.name, row.size, self._time, executable=row.is_executable, open=opens)
        )

    def _judge_links(self) -> None:
        leaving: set[str] = set()
        for path, target in self._links.items():
            fault = link_fault(path, self._links)
            if fault is None:
                continue
            if self._is_wanted(os.fsdecode(path)):
                raise BadInput(f"{shown(path)} is a symbolic link to {shown(target)}, which {fault}; leave it out with `exclude`")
            leaving.add(os.fsdecode(path))
        if leaving:
            self._found = [found for found in self._found if found.path not in leaving]

    # Submodules

    def _modules(self, commit: str) -> dict[bytes, Module]:
        if not self._entry.submodules:
            return {}
        top = self._rows("--full-tree", commit, "--", ".gitmodules")
        if not top:
            return {}
        if top[0].kind != "blob" or top[0].is_link or top[0].size > _MOST_GITMODULES:
            raise BadInput(".gitmodules is no plain file of at most 1 MiB; leave submodules out with `submodules: false`")
        wanted = r"^submodule\..*\.(path|url)$"
        try:
            listed = self._git.run("config", "-z", "--no-includes", "--blob", top[0].name, "--get-regexp", wanted, most=4 << 20)
        except GitFailed as error:
            if not error.is_silent:
                raise BadInput(f".gitmodules cannot be read ({str(error)[:200]}); use `submodules: false`") from None
            return {}
        return parse_modules(listed)

    def _module(
        self, remote: Remote, modules: dict[bytes, Module], row: Row, path: bytes, name: bytes, prefix: bytes, depth: int
    ) -> None:
        module = modules.get(name)
        where = join(prefix, name)
        if module is None:
            self._directory(path, where, row.name)
            self._without.append(shown(where))
            return
        self._fetched += 1
        if depth >= MOST_MODULE_DEPTH or self._fetched > MOST_MODULES:
            raise BadInput(
                f"the submodule {shown(where)}: more than {MOST_MODULES} submodules, or deeper than {MOST_MODULE_DEPTH} levels; "
                "give it an entry of its own"
            )
        there = module_remote(remote, module)
        found = self._fetch.commit(there, row.name)
        if found is None:
            raise BadInput(f"the submodule {shown(where)}: {there.url} has no commit {row.name}, which the repository asks for")
        self._list(there, found, path, b"", where, depth + 1)

    # Contents

    def _open(self, row: Row) -> Content:
        in_memory = row.size <= _IN_MEMORY
        fd = os.memfd_create("git", os.MFD_CLOEXEC) if in_memory else _spool(self._scratch)
        try:
            offset = 0

            def take(data: bytes) -> None:
                nonlocal offset
                if offset == 0 and row.size < _MOST_POINTER and data.startswith(_POINTER):
                    self._pointers += 1
                view = memoryview(data)
                while view:
                    count = os.pwrite(fd, view, offset)
                    offset, view = offset + count, view[count:]

            self._objects.copy(row.name, take, row.size)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, GitFailed):
                raise OSError(f"git failed: {error}") from None
            raise
        return Content(fd, offset, self._time, 0o755 if row.is_executable else 0o644)


def _spool(folder: Path) -> int:
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return os.dup(file.fileno())
