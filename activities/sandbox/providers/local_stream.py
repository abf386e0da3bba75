"""The output streams of a job inside a local sandbox: from a pipe or a terminal into a bounded stream file of the host.

Runs inside the sandbox only: Python 3.9, standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import sys
import termios

from activities.sandbox.providers.local_wire import HEAD, RING, TOTAL_AT, TOTALS

PIPE_SIZE = 1 << 20
F_SETPIPE_SZ = 1031
"""From linux/fcntl.h; the fcntl module names it only from Python 3.10."""
WINDOW = struct.Struct("HH")
"""Rows and columns, as they are handed from init to a supervisor."""
SIZE = (24, 80)
"""Rows and columns of a new terminal."""
LINE = 4095
"""Bytes of a line that a terminal takes while it collects whole lines (N_TTY_BUF_SIZE of the kernel); it drops what is over."""
TIOCGPTN = 0x80045430
"""From asm-generic/ioctls.h: asks a terminal for its number under /dev/pts."""
_LINE_ENDS = re.compile(rb"[\n\r\x03\x04\x15\x1a\x1c]")
"""What ends a line as it is typed, or throws it away."""


class Stream:
    """One output stream: a pipe from the command, a stream file (see local_wire) on the host, and the true total."""

    def __init__(self, file: int, ends: tuple[int, int] | None = None) -> None:
        self.file = file
        self.total = 0
        self.kept: int | None = None
        """How much was kept before the disk was full; what comes later is counted only."""
        self.open = True
        self.pipe, self.writer = ends or os.pipe()
        os.set_blocking(self.pipe, False)
        with contextlib.suppress(OSError):  # a user with many big pipes gets small ones, which work, only slower
            fcntl.fcntl(self.pipe, F_SETPIPE_SZ, PIPE_SIZE)

    def pump(self, keep: bool) -> None:
        """Take what the pipe holds now, at most a few pipes full, so that a flood cannot hold up the clock."""
        for _ in range(8):
            try:
                data = os.read(self.pipe, PIPE_SIZE)
            except BlockingIOError:
                return
            except OSError:
                data = b""  # a terminal that nobody has open any more
            if not data:
                self.open = False
                self._close()
                return
            if keep:
                self._store(memoryview(data))

    def wanted(self) -> int:
        """Return what to poll for."""
        return select.POLLIN

    def _close(self) -> None:
        os.close(self.pipe)

    def _store(self, data: memoryview) -> None:
        start = self.total
        self.total += len(data)
        if self.kept is not None:
            return
        try:
            if start < HEAD:
                self._write(data[: HEAD - start], start)
                data = data[HEAD - start :]
            if data:
                data = data[-RING:]
                at = (self.total - len(data) - HEAD) % RING
                self._write(memoryview(TOTALS.pack(start, self.total)), TOTAL_AT)
                self._write(data[: RING - at], HEAD + at)
                self._write(data[RING - at :], HEAD)
                self._write(memoryview(TOTALS.pack(self.total, self.total)), TOTAL_AT)
        except OSError:
            self.kept = min(start, HEAD)  # a full disk costs the output and not the command

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            written = os.pwrite(self.file, data, at)
            data, at = data[written:], at + written


class Terminal(Stream):
    """The output of a command that has a terminal, and the way for what is typed there. `pipe` is the terminal's own side."""

    def __init__(self, file: int) -> None:
        super().__init__(file, os.openpty())
        self.resize(*SIZE)
        self.taken = 0
        """How many bytes that were typed are with the command by now, or with nobody, as it is gone."""
        self._typed = bytearray()

    def number(self) -> int:
        """Return its number under /dev/pts."""
        return int.from_bytes(fcntl.ioctl(self.pipe, TIOCGPTN, bytes(4)), sys.byteorder)

    def let_go(self) -> None:
        """Close the command's side, which is held for as long as the command lives: it may come back to /dev/tty at any time."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def type(self, data: bytes) -> None:
        """Take input, as much of it as the terminal has room for now."""
        self._typed += data
        self.flush()

    def flush(self) -> None:
        """Hand on what was typed and found no room before."""
        try:
            while self._typed:
                written = os.write(self.pipe, self._typed[:4096])
                self.taken += written
                del self._typed[:written]
        except BlockingIOError:
            return
        except OSError:  # nobody reads any more
            self.taken += len(self._typed)
            self._typed.clear()

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the window; the kernel tells the command (SIGWINCH). Layout: struct winsize, tty_ioctl(4)."""
        fcntl.ioctl(self.pipe, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wanted(self) -> int:
        """Return what to poll for."""
        return select.POLLIN | (select.POLLOUT if self._typed else 0)

    def _close(self) -> None:
        # The kernel would send SIGHUP to a command that only closed its standard streams. It ends with this process.
        pass


def lines(before: int, data: bytes) -> tuple[int, int]:
    """Return the bytes of the longest line in what is typed after `before` bytes of one, and of the line that it leaves open."""
    lengths = [len(line) for line in _LINE_ENDS.split(data)]
    lengths[0] += before
    return max(lengths), lengths[-1]


def collects_lines(number: int) -> bool:
    """Tell whether a terminal gives its command whole lines only (ICANON), and so cuts long ones."""
    try:
        fd = os.open(f"/dev/pts/{number}", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # it has ended
        return False
    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ICANON)
    except termios.error:
        return False
    finally:
        os.close(fd)
