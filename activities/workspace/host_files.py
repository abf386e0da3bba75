"""Reaching files of a hostile tree on this host: from an open directory, and never through a link."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import time

from activities.workspace.ingest import Content, Unreadable, Vanished
from activities.workspace.tree import PERMISSIONS, Xattrs

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE})
"""What says that a path is not, or no longer, what it was when it was listed."""

_OPENAT2 = 437
"""The number of openat2(2), the same on every architecture."""
_RESOLVE = 0x04 | 0x08
"""RESOLVE_NO_SYMLINKS and RESOLVE_BENEATH."""
_UNUSABLE = {errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG, errno.E2BIG}
_system = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    """struct open_how of openat2(2)."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_below(root: int, path: bytes, flags: int) -> int:
    """Open what lies at `path` below the open directory `root`. Raises OSError; ELOOP when a part of the path is a link."""
    how = _How(flags, 0, _RESOLVE)
    fd = _system.syscall(_OPENAT2, root, path, ctypes.byref(how), ctypes.sizeof(how))
    if fd >= 0:
        return int(fd)
    number = ctypes.get_errno()
    if number in _UNUSABLE:
        return _open_step_by_step(root, path, flags)
    raise OSError(number, os.strerror(number))


def _open_step_by_step(root: int, path: bytes, flags: int) -> int:
    *folders, name = path.split(b"/")
    here = os.dup(root)
    try:
        for folder in folders:
            below = os.open(folder, OPEN_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        return os.open(name, flags, dir_fd=here)
    finally:
        os.close(here)


def open_folder(root: int, path: bytes) -> int:
    """Open a directory to reach the files in it. Raises Vanished or Unreadable."""
    try:
        return open_below(root, path, OPEN_DIRECTORY) if path else os.dup(root)
    except OSError as error:
        raise _lost(error) from error


def open_content(folder: int, name: str) -> Content:
    """Open a regular file to read its content. Raises Vanished when it is none any more, Unreadable when it may not be read."""
    try:
        fd = os.open(name, OPEN_FILE, dir_fd=folder)
    except OSError as error:
        raise _lost(error) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise Vanished
    extents = _extents(fd, status.st_size) if status.st_blocks * 512 < status.st_size else None
    return Content(fd, status.st_size, status.st_mtime_ns, status.st_mode & PERMISSIONS, xattrs_of(fd), extents, status.st_ino)


def _lost(error: OSError) -> Vanished | Unreadable:
    return Vanished() if error.errno in GONE else Unreadable(error.strerror or "it cannot be opened")


def xattrs_of(fd: int) -> Xattrs:
    """Return the user attributes of an open file or directory."""
    found: list[tuple[bytes, bytes]] = []
    with contextlib.suppress(OSError):
        for name in os.listxattr(fd):
            if name.startswith("user."):
                found.append((os.fsencode(name), os.getxattr(fd, name)))
    return tuple(sorted(found))


def _extents(fd: int, size: int) -> list[tuple[int, int]]:
    """Return where a sparse file has data, as (offset, length)."""
    extents: list[tuple[int, int]] = []
    at = 0
    try:
        while at < size:
            start = os.lseek(fd, at, os.SEEK_DATA)
            at = os.lseek(fd, start, os.SEEK_HOLE)
            extents.append((start, min(at, size) - start))
    except OSError as error:
        if error.errno != errno.ENXIO:  # no more data
            return [(0, size)]
    return extents


def coarse_now() -> int:
    """Return the time that the kernel would give a file written now, in nanoseconds."""
    return time.clock_gettime_ns(5)  # CLOCK_REALTIME_COARSE, which `time` has no name for; see time(7)
