"""Looking at files and changing them, many in one call. Runs inside the sandbox only: Python 3.6, standard library."""

import contextlib
import errno
import os
import stat

from activities.sandbox.portable_helper.wire import INLINE, Refused, raw, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Tuple

    from activities.sandbox.portable_helper.wire import Request, Words

    Entry = Tuple[str, str, int, int, "str | None"]

CHUNK = 1 << 20
OPEN_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OPEN_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
PERMISSIONS = 0o777
CLOSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Why a directory below the top of a walk may be told without its content."""
REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""What has become of a directory that was removed or replaced since it was listed."""


def refusal(path: bytes, error: OSError) -> Refused:
    """Return the refusal that tells of `error` at `path`."""
    return Refused("%s: %s" % (shown(path), os.strerror(error.errno or errno.EIO)))


def text(name: bytes) -> str:
    """Return a name as the harness takes it."""
    return name.decode("utf-8", "surrogateescape")


def open_regular(path: bytes, named: bytes) -> int:
    """Open a regular file for reading, without ever waiting for a FIFO or a device. Raises Refused."""
    try:
        fd = os.open(path, OPEN_FILE)
    except OSError as error:
        raise refusal(named, error) from error
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_dev != os.stat("/proc").st_dev:
        return fd
    os.close(fd)
    raise Refused("%s: is %s" % (shown(named), "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"))


def read(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Give a small file, or tell where a larger one is."""
    path = raw(given["path"])
    fd = open_regular(os.path.join(raw(given["workspace"]), path), path)
    try:
        data = b""
        while len(data) <= INLINE:
            piece = os.read(fd, CHUNK)
            if not piece:
                return {"size": len(data)}, [data]
            data += piece
        return {"at": text(os.readlink(b"/proc/self/fd/%d" % fd))}, []
    finally:
        os.close(fd)


def entry(path: bytes, found: os.stat_result, directory: "int | None", name: bytes) -> "Entry":
    """Describe one path; the target of a link is read through `directory` and `name`."""
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISREG(found.st_mode):
        return text(path), "file", mode, found.st_size, None
    if stat.S_ISDIR(found.st_mode):
        return text(path), "directory", mode, 0, None
    if stat.S_ISLNK(found.st_mode):
        return text(path), "symlink", mode, 0, text(os.readlink(name, dir_fd=directory))
    return text(path), "other", mode, 0, None


def look(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Describe each path, with the content of every regular file of at most `max_bytes`."""
    entries: "List[Entry]" = []
    lengths: "List[int | None]" = []
    body: "List[bytes]" = []
    for path in map(raw, given["paths"]):
        full = os.path.join(raw(given["workspace"]), path)
        length: "int | None" = None
        try:
            found = entry(path, os.lstat(full), None, full)
            if found[1] == "file" and found[3] <= given["max_bytes"]:
                fd = open_regular(full, path)
                with open(fd, "rb") as file:
                    body.append(file.read(found[3]))
                length = len(body[-1])
                found = (found[0], "file", found[2], length, None)
        except (FileNotFoundError, NotADirectoryError):
            found = (text(path), "missing", 0, 0, None)
        except OSError as error:
            raise refusal(path, error) from error
        entries.append(found)
        lengths.append(length)
    return {"entries": entries, "lengths": lengths}, body


def walk(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """List everything below a workspace path; links are told, not followed.

    A directory below it that cannot be listed is told as a "closed directory", and costs nothing but what is in it.
    """
    top = raw(given["path"])
    entries: "Dict[bytes, Entry]" = {}
    waiting = [top]
    while waiting:
        directory = waiting.pop()
        try:
            listed = list_directory(raw(given["workspace"]), directory)
        except OSError as error:
            if directory == top or error.errno not in CLOSED + REPLACED:
                raise refusal(directory or b".", error) from error
            if error.errno in CLOSED:
                entries[directory] = (entries[directory][0], "closed directory") + entries[directory][2:]
            continue
        entries.update(listed)
        waiting += [path for path, found in listed if found[1] == "directory"]
    return {"entries": list(entries.values())}, []


def list_directory(workspace: bytes, directory: bytes) -> "List[Tuple[bytes, Entry]]":
    """Describe everything in one directory of the workspace. Raises OSError."""
    fd = os.open(os.path.join(workspace, directory), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found: "List[Tuple[bytes, Entry]]" = []
    try:
        for name in map(os.fsencode, os.listdir(fd)):
            path = directory + b"/" + name if directory else name
            with contextlib.suppress(FileNotFoundError):
                found.append((path, entry(path, os.stat(name, dir_fd=fd, follow_symlinks=False), fd, name)))
        return found
    finally:
        os.close(fd)


class Transaction:
    """Changes of files that become visible together: all new content is written first, then all is moved into place."""

    def __init__(self, data: int, workspace: bytes) -> None:
        self.data = data
        self.workspace = workspace
        self.offset = 0
        self.directories: "Dict[bytes, int]" = {}
        self.made: "List[Tuple[int, bytes]]" = []
        self.written: "List[Tuple[int, bytes, bytes]]" = []
        self.removals: "List[Tuple[int, bytes]]" = []

    def directory(self, path: bytes, make: bool) -> int:
        """Return an open directory of the workspace, reached through no link. Raises Refused, or FileNotFoundError."""
        if b"" not in self.directories:
            self.directories[b""] = os.open(self.workspace, OPEN_DIRECTORY)
        here, parent = b"", self.directories[b""]
        for name in path.split(b"/") if path else ():
            here = here + b"/" + name if here else name
            if here not in self.directories:
                self.directories[here] = self.step(here, parent, name, make)
            parent = self.directories[here]
        return parent

    def step(self, path: bytes, parent: int, name: bytes, make: bool) -> int:
        """Open the directory `name` of `parent`, which is `path`. Raises Refused, or FileNotFoundError."""
        try:
            return self.enter(parent, name, make)
        except NotADirectoryError:
            is_link = stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
            what = "a link; name the directory itself" if is_link else "no directory"
            raise Refused("%s: is %s" % (shown(path), what)) from None

    def enter(self, parent: int, name: bytes, make: bool) -> int:
        """Open a directory, making it if it is not there and `make` says so."""
        try:
            return os.open(name, OPEN_DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
        os.mkdir(name, 0o755, dir_fd=parent)
        self.made.append((parent, name))
        return os.open(name, OPEN_DIRECTORY, dir_fd=parent)

    def stage(self, parent: int, name: bytes, path: bytes, length: int, mode: int) -> None:
        """Write the next `length` bytes of the data file beside their place in the open directory `parent`."""
        if self.kind(parent, name) == stat.S_IFDIR:
            raise Refused("%s: is a directory" % shown(path))
        temporary = b".caisson-" + os.urandom(8).hex().encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=parent)
        self.written.append((parent, temporary, name))
        try:
            left = length
            while left:
                piece = os.pread(self.data, min(left, CHUNK), self.offset)
                if not piece:
                    raise Refused("%s: the content did not arrive whole" % shown(path))
                while piece:
                    written = os.write(fd, piece)
                    piece, left, self.offset = piece[written:], left - written, self.offset + written
            os.fchmod(fd, mode & PERMISSIONS)  # set-uid and its kin have no place in a workspace
        finally:
            os.close(fd)

    def stage_removal(self, path: bytes) -> None:
        """Note a file to remove, if it is there and can be removed."""
        head, _, name = path.rpartition(b"/")
        try:
            parent = self.directory(head, make=False)
        except FileNotFoundError:
            return
        kind = self.kind(parent, name)
        if kind is None:
            return
        if kind == stat.S_IFDIR:
            raise Refused("%s: is a directory, and only files can be removed" % shown(path))
        if not os.access("/proc/self/fd/%d" % parent, os.W_OK | os.X_OK):
            raise Refused("%s: its directory is not writable" % shown(path))
        self.removals.append((parent, name))

    def kind(self, parent: int, name: bytes) -> "int | None":
        """Return what stands there."""
        try:
            return stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return None

    def commit(self) -> None:
        """Move everything into place. Everything that can be foreseen to fail has been tried before."""
        while self.written:
            parent, temporary, name = self.written[0]
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            self.written.pop(0)
            self.made.clear()
        for parent, name in self.removals:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)

    def abandon(self) -> None:
        """Leave nothing behind of what has not been moved into place."""
        for parent, temporary, _ in self.written:
            os.unlink(temporary, dir_fd=parent)
        for parent, name in reversed(self.made):
            os.rmdir(name, dir_fd=parent)


def make_directories(path: bytes) -> None:
    """Make a directory and those that lead to it, however many. Raises OSError."""
    missing: "List[bytes]" = []
    while path not in (b"", b"/") and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for one in reversed(missing):
        try:
            os.mkdir(one, 0o755)
        except FileExistsError:
            if not os.path.isdir(one):
                raise


def change(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Make all changes, or none. With `anywhere`, one file at any path whose links on the way are followed."""
    source = raw(given["data"]) if given["data"] else b"/dev/null"
    data = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    if given["data"]:
        os.unlink(source)
    transaction = Transaction(data, raw(given["workspace"]))
    path = b"."
    try:
        for shown_path, length, mode in given["changes"]:
            path = raw(shown_path)
            if length is None:
                transaction.stage_removal(path)
                continue
            if given["anywhere"]:
                head, name = os.path.split(os.path.join(transaction.workspace, path))
                make_directories(head)
                parent = os.open(head, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            else:
                head, _, name = path.rpartition(b"/")
                parent = transaction.directory(head, make=True)
            transaction.stage(parent, name, path, length, mode)
        transaction.commit()
    except (OSError, Refused) as error:
        transaction.abandon()
        if isinstance(error, OSError):
            raise refusal(path, error) from error
        raise
    return {}, []
