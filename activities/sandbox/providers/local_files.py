"""File requests inside a local sandbox: read, write, look, change and walk, each in a short-lived child of init.

They run behind the sandbox's own mounts, so a link made by the agent can lead nowhere that the agent could not go itself;
and in a child, so that a slow disk or a hostile tree holds up only the request that met it.
Runs inside the sandbox only: Python 3.9, standard library.
"""
# ruff: noqa: PTH102, PTH112, PTH116, PTH118, PTH120, PTH208 -- paths here may hold any bytes and are opened step by step, and pathlib
# is slow to load

from __future__ import annotations

import contextlib
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from activities.sandbox.providers.local_wire import Change, Entry, Reply, Request

WORKSPACE = "/workspace"
CHUNK = 1 << 20
OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OPEN_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PERMISSIONS = 0o777
MAX_PATH = 4000
"""Bytes of a path. The system takes 4095, with the workspace before it."""
CLOSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Why a directory below the top of a walk may be told without its content."""
REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What has become of a directory that was removed or replaced since it was listed."""


class Refused(Exception):
    """The path cannot be used as asked; the text names it and says why."""


def refusal(path: str, error: OSError) -> Refused:
    """Return the refusal that tells of `error` at `path`."""
    return Refused(f"{path}: {os.strerror(error.errno or errno.EIO)}")


def normal(path: str) -> str:
    """Return a workspace path in its normal form, which it must already have. The workspace itself is ''. Raises Refused."""
    if path in ("", "."):
        return ""
    if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        raise Refused(f"{path}: give a path relative to {WORKSPACE}, without '.', '..', '//' or a slash at its end")
    if "\0" in path:
        raise Refused(f"{path!r}: a path cannot hold a NUL byte")
    check_length(path)
    return path


def check_length(path: str) -> None:
    """Refuse what the system takes in no call. Raises Refused."""
    if len(os.fsencode(path)) > MAX_PATH:
        raise Refused(f"{path[:100]}...: File name too long")


def open_regular(path: str, shown: str) -> int:
    """Open a regular file for reading, without ever waiting for a FIFO or a device. Raises Refused."""
    try:
        fd = os.open(path, OPEN_FILE)
    except OSError as error:
        raise refusal(shown, error) from error
    found = os.fstat(fd)
    # What procfs shows depends on who reads, and the one who reads in the end is the worker outside.
    if stat.S_ISREG(found.st_mode) and found.st_dev != os.stat("/proc").st_dev:
        return fd
    os.close(fd)
    raise Refused(f"{shown}: is {'a directory' if stat.S_ISDIR(found.st_mode) else 'not a regular file'}")


def read(request: Request) -> tuple[Reply, list[int]]:
    """Open the file at `path` and hand it over."""
    path = request["path"]
    if "\0" in path:
        raise Refused(f"{path!r}: a path cannot hold a NUL byte")
    return {}, [open_regular(os.path.join(WORKSPACE, path), path)]


def copy(source: int, offset: int, target: int, length: int) -> int:
    """Copy up to `length` bytes of `source` from `offset` to the end of `target`; return how many there were."""
    copied = 0
    while copied < length:
        sent = os.sendfile(target, source, offset + copied, min(CHUNK, length - copied))
        if sent == 0:
            break
        copied += sent
    return copied


def entry(path: str, found: os.stat_result, directory: int | None = None, name: str | None = None) -> Entry:
    """Describe one path; the target of a link is read through `directory` and `name` where given."""
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISREG(found.st_mode):
        return path, "file", mode, found.st_size, None
    if stat.S_ISDIR(found.st_mode):
        return path, "directory", mode, 0, None
    if stat.S_ISLNK(found.st_mode):
        return path, "symlink", mode, 0, os.readlink(name or path, dir_fd=directory)
    return path, "other", mode, 0, None


def settled_entry(path: str, directory: int, name: str) -> Entry | None:
    """Describe one name in an open directory, or return None when it is gone. It may be swapped for a link at any moment."""
    for _ in range(20):
        try:
            return entry(path, os.stat(name, dir_fd=directory, follow_symlinks=False), directory, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:  # no link any more
                raise
    return None


def look(request: Request) -> tuple[Reply, list[int]]:
    """Describe each path, and put the content of every regular file of at most `max_bytes` into one data file, in order."""
    limit = request["max_bytes"]
    data = os.memfd_create("look", os.MFD_CLOEXEC)
    entries: list[Entry] = []
    lengths: list[int | None] = []
    for path in request["paths"]:
        full = os.path.join(WORKSPACE, normal(path))
        length = None
        try:
            found = entry(path, os.lstat(full), name=full)
            if found[1] == "file" and found[3] <= limit:
                fd = open_regular(full, path)
                length = copy(fd, 0, data, found[3])
                os.close(fd)
                found = (*found[:3], length, None)
        except (FileNotFoundError, NotADirectoryError):
            found = (path, "missing", 0, 0, None)
        except OSError as error:
            raise refusal(path, error) from error
        entries.append(found)
        lengths.append(length)
    return {"entries": entries, "lengths": lengths}, [data]


def walk(request: Request) -> tuple[Reply, list[int]]:
    """List everything below a workspace path, sorted by path; links are told, not followed.

    A directory below it that cannot be listed is told as a "closed directory", and costs nothing but what is in it.
    """
    top = normal(request["path"])
    entries: dict[str, Entry] = {}
    waiting = [top]
    while waiting:
        directory = waiting.pop()
        try:
            listed = list_directory(directory)
        except OSError as error:
            if directory == top or error.errno not in (*CLOSED, *REPLACED):
                raise refusal(directory or ".", error) from error
            if error.errno in CLOSED:
                entries[directory] = directory, "closed directory", *entries[directory][2:]
            continue
        entries.update((found[0], found) for found in listed)
        waiting += [found[0] for found in listed if found[1] == "directory"]
    return {"entries": sorted(entries.values())}, []


def list_directory(directory: str) -> list[Entry]:
    """Describe everything in one directory of the workspace. Raises OSError."""
    fd = os.open(os.path.join(WORKSPACE, directory), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = (settled_entry(f"{directory}/{name}" if directory else name, fd, name) for name in os.listdir(fd))
        return [entry for entry in found if entry is not None]
    finally:
        os.close(fd)


class Transaction:
    """Changes of files that become visible together: all new content is written first, then all is moved into place."""

    def __init__(self, data: int) -> None:
        self._data = data
        self._offset = 0
        self._directories: dict[str, int] = {}
        self._made: list[tuple[int, str]] = []
        self._written: list[tuple[int, str, str]] = []
        self._removals: list[tuple[int, str]] = []

    def directory(self, path: str, make: bool) -> int:
        """Return an open directory of the workspace, reached through no link. Raises Refused, or FileNotFoundError."""
        if "" not in self._directories:
            self._directories[""] = os.open(WORKSPACE, OPEN_DIRECTORY)
        here, parent = "", self._directories[""]
        for name in path.split("/") if path else ():
            here = f"{here}/{name}" if here else name
            if here not in self._directories:
                self._directories[here] = self._step(here, parent, name, make)
            parent = self._directories[here]
        return parent

    def _step(self, path: str, parent: int, name: str, make: bool) -> int:
        try:
            return self._enter(parent, name, make)
        except NotADirectoryError:
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
            raise Refused(f"{path}: is {'a link; name the directory itself' if is_link else 'no directory'}") from None

    def _enter(self, parent: int, name: str, make: bool) -> int:
        try:
            return os.open(name, OPEN_DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
        os.mkdir(name, 0o755, dir_fd=parent)
        self._made.append((parent, name))
        return os.open(name, OPEN_DIRECTORY, dir_fd=parent)

    def stage(self, parent: int, name: str, path: str, length: int, mode: int) -> None:
        """Write the next `length` bytes of the data file beside their place in the open directory `parent`."""
        if self._kind(parent, name) == stat.S_IFDIR:
            raise Refused(f"{path}: is a directory")
        temporary = f".caisson-{os.urandom(8).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=parent)
        self._written.append((parent, temporary, name))
        try:
            if copy(self._data, self._offset, fd, length) != length:
                raise Refused(f"{path}: the content did not arrive whole")
            os.fchmod(fd, mode & PERMISSIONS)  # set-uid and its kin have no place in a workspace
        finally:
            os.close(fd)
        self._offset += length

    def stage_removal(self, path: str) -> None:
        """Note a file to remove, if it is there and can be removed."""
        head, _, name = path.rpartition("/")
        try:
            parent = self.directory(head, make=False)
        except FileNotFoundError:
            return
        kind = self._kind(parent, name)
        if kind is None:
            return
        if kind == stat.S_IFDIR:
            raise Refused(f"{path}: is a directory, and only files can be removed")
        if not os.access(f"/proc/self/fd/{parent}", os.W_OK | os.X_OK):
            raise Refused(f"{path}: its directory is not writable")
        self._removals.append((parent, name))

    def _kind(self, parent: int, name: str) -> int | None:
        try:
            return stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return None

    def commit(self) -> None:
        """Move everything into place. Everything that can be foreseen to fail has been tried before."""
        while self._written:
            parent, temporary, name = self._written[0]
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            self._written.pop(0)
            self._made.clear()
        for parent, name in self._removals:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)

    def abandon(self) -> None:
        """Leave nothing behind of what has not been moved into place."""
        for parent, temporary, _ in self._written:
            os.unlink(temporary, dir_fd=parent)
        for parent, name in reversed(self._made):
            os.rmdir(name, dir_fd=parent)


def make_directories(path: str) -> None:
    """Make a directory and those that lead to it, however many. Raises OSError."""
    missing: list[str] = []
    while path not in ("", "/") and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for one in reversed(missing):
        try:
            os.mkdir(one, 0o755)
        except FileExistsError:
            if not os.path.isdir(one):
                raise


def check_overlap(changes: list[Change]) -> None:
    """Refuse changes that name one path twice, or a file below another file that is written."""
    written = {change["path"] for change in changes if change["length"] is not None}
    if len({change["path"] for change in changes}) != len(changes):
        raise Refused("a path is named twice in one set of changes; merge its changes")
    for path in written:
        parent = path
        while parent := parent.rpartition("/")[0]:
            if parent in written:
                raise Refused(f"{parent}: is written as a file and also holds {path}")


def change(request: Request, data: int) -> tuple[Reply, list[int]]:
    """Make all changes, or none."""
    changes = request["changes"]
    check_overlap(changes)
    transaction = Transaction(data)
    path = "."
    try:
        for item in changes:
            path = item["path"]
            if not normal(path):
                raise Refused(f"{path or '.'}: is the workspace itself")
            if item["length"] is None:
                transaction.stage_removal(path)
            else:
                head, _, name = path.rpartition("/")
                transaction.stage(transaction.directory(head, make=True), name, path, item["length"], item["mode"])
        transaction.commit()
    except (OSError, Refused) as error:
        transaction.abandon()
        if isinstance(error, OSError):
            raise refusal(path, error) from error
        raise
    return {}, []


def write(request: Request, data: int) -> tuple[Reply, list[int]]:
    """Write one file anywhere in the sandbox that its user may write. Links on the way are followed, the last part is not."""
    item = request["changes"][0]
    path = item["path"]
    head, name = os.path.split(os.path.join(WORKSPACE, path))
    if name in ("", ".", "..") or "\0" in path:
        raise Refused(f"{path!r}: names no file")
    check_length(path)
    transaction = Transaction(data)
    try:
        make_directories(head)
        parent = os.open(head, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        transaction.stage(parent, name, path, item["length"] or 0, item["mode"])
        transaction.commit()
    except (OSError, Refused) as error:
        transaction.abandon()
        if isinstance(error, OSError):
            raise refusal(path, error) from error
        raise
    return {}, []


def serve(request: Request, fds: list[int]) -> tuple[Reply, list[int]]:
    """Answer one file request; `fds` holds the data file of those that bring one. Whatever goes wrong is a refusal."""
    operation = request["op"]
    try:
        if operation in ("change", "write"):
            return (change if operation == "change" else write)(request, fds[0])
        return {"read": read, "look": look, "walk": walk}[operation](request)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{operation}: {type(error).__name__}: {error}") from error
