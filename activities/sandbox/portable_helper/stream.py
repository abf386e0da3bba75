"""The output of a job: from a pipe or a terminal into a bounded file. Runs inside the sandbox only: Python 3.6, standard library.

The file holds the first HEAD bytes, then a ring with the last RING, and behind that, once the head is full, two counters: up to
which byte of the stream the ring is being overwritten, and the true total.
"""

import contextlib
import fcntl
import os
import re
import select
import struct
import termios

from activities.sandbox.portable_helper.wire import HEAD, RING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Tuple

TOTAL_AT = HEAD + RING
TOTALS = struct.Struct("<QQ")
PIPE_SIZE = 1 << 18
F_SETPIPE_SZ = 1031
"""From linux/fcntl.h; the fcntl module names it only from Python 3.10."""
LINE = 4095
"""Bytes of a line that a terminal takes while it collects whole lines (N_TTY_BUF_SIZE of the kernel); it drops what is over."""
LINE_ENDS = re.compile(rb"[\n\r\x03\x04\x15\x1a\x1c]")
"""What ends a line as it is typed, or throws it away."""


class Stream:
    """One output stream of a running command, and its file."""

    def __init__(self, file: int, ends: "Tuple[int, int] | None" = None) -> None:
        self.file = file
        self.total = 0
        self.kept = -1
        """How much was kept before the disk was full, when it was; what comes later is counted only."""
        self.open = True
        self.pipe, self.writer = ends or os.pipe()
        os.set_blocking(self.pipe, False)
        with contextlib.suppress(OSError):
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
                self.close()
                return
            if keep:
                self.store(memoryview(data))

    def wanted(self) -> int:
        """Return what to poll for."""
        return select.POLLIN

    def close(self) -> None:
        """Let go of the pipe at its end."""
        os.close(self.pipe)

    def store(self, data: memoryview) -> None:
        """Keep what came."""
        start = self.total
        self.total += len(data)
        if self.kept >= 0:
            return
        try:
            if start < HEAD:
                self.write(data[: HEAD - start], start)
                data = data[HEAD - start :]
            if data:
                data = data[-RING:]
                at = (self.total - len(data) - HEAD) % RING
                self.write(memoryview(TOTALS.pack(start, self.total)), TOTAL_AT)
                self.write(data[: RING - at], HEAD + at)
                self.write(data[RING - at :], HEAD)
                self.write(memoryview(TOTALS.pack(self.total, self.total)), TOTAL_AT)
        except OSError:
            self.kept = min(start, HEAD)  # a full disk costs the output and not the command

    def write(self, data: memoryview, at: int) -> None:
        """Write all of it."""
        while data:
            written = os.pwrite(self.file, data, at)
            data, at = data[written:], at + written


class Terminal(Stream):
    """The output of a command that has a terminal, and the way for what is typed there. `pipe` is the terminal's own side."""

    def __init__(self, file: int) -> None:
        super().__init__(file, os.openpty())
        self.resize(24, 80)
        self.typed = bytearray()
        self.line = 0
        """How many bytes were typed of a line that is not ended yet."""

    def let_go(self) -> None:
        """Close the command's side, which is held for as long as the command lives: it may come back to /dev/tty at any time."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def takes(self, data: bytes) -> bool:
        """Tell whether no line would be cut, and count what is typed: a terminal that collects whole lines cuts long ones."""
        lengths = [len(line) for line in LINE_ENDS.split(data)]
        lengths[0] += self.line
        collects = termios.tcgetattr(self.pipe)[3] & termios.ICANON
        if collects and max(lengths) > LINE:
            return False
        self.line = lengths[-1] if collects else 0
        return True

    def type(self, data: bytes) -> None:
        """Take input, as much of it as the terminal has room for now."""
        self.typed += data
        self.flush()

    def flush(self) -> None:
        """Hand on what was typed and found no room before."""
        try:
            while self.typed:
                written = os.write(self.pipe, self.typed[:4096])
                del self.typed[:written]
        except BlockingIOError:
            return
        except OSError:  # nobody reads any more
            self.typed.clear()

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the window; the kernel tells the command (SIGWINCH). Layout: struct winsize, tty_ioctl(4)."""
        fcntl.ioctl(self.pipe, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wanted(self) -> int:
        """Return what to poll for."""
        return select.POLLIN | (select.POLLOUT if self.typed else 0)

    def close(self) -> None:
        """Keep it: the kernel would send SIGHUP to a command that only closed its standard streams."""


class Output:
    """A stream file, open for reading, as long as it was at its end, or is now. Close `fd`."""

    def __init__(self, path: bytes, kept: "int | None" = None) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if kept is not None:
            self.total = kept
            return
        self.total = os.fstat(self.fd).st_size
        counters = os.pread(self.fd, TOTALS.size, TOTAL_AT)
        if len(counters) == TOTALS.size:
            self.total = TOTALS.unpack(counters)[1]

    def read(self, start: int, end: int) -> bytes:
        """Return the kept bytes between two positions of the stream."""
        if end <= HEAD:
            return os.pread(self.fd, max(end - start, 0), start)
        if start < HEAD:
            return self.read(start, HEAD) + self.read(HEAD, end)
        at, length = HEAD + (start - HEAD) % RING, end - start
        first = min(length, HEAD + RING - at)
        return os.pread(self.fd, first, at) + os.pread(self.fd, length - first, HEAD)

    def tail(self, length: int) -> bytes:
        """Return the last `length` bytes, or from the first byte on after which everything was kept."""
        kept_from = 0 if self.total <= HEAD + RING else self.total - RING
        return self.read(max(self.total - length, kept_from, 0), self.total)

    def ends(self, limit: int) -> "Tuple[bytes, bytes | None]":
        """Return all of it and None, or its beginning and its end, together `limit` bytes."""
        if self.total <= min(limit, HEAD + RING):
            return self.read(0, self.total), None
        return self.read(0, min(limit // 2, HEAD)), self.tail(limit - limit // 2)

    def part(self, start: int, end: int, limit: int) -> bytes:
        """Return what lies between two positions, with a marker for what is over `limit` bytes or is not kept.

        The stream may grow meanwhile: what the writer overwrites is left out, and never given in pieces of two ages.
        """
        half = limit // 2
        wanted = [(start, end)] if end - start <= limit else [(start, start + half), (end - (limit - half), end)]
        data, at = b"", start
        for first, last in wanted:
            for begin, stop in ((first, min(last, HEAD)), (max(first, HEAD), last)):
                if begin >= stop:
                    continue
                begin = max(begin, min(self.overwritten(), stop)) if begin >= HEAD else begin
                piece = self.read(begin, stop)
                lost = min(max(self.overwritten() - begin, 0), len(piece)) if begin >= HEAD else 0
                data += marker(begin + lost - at) + piece[lost:]
                at = stop
        return data + marker(end - at)

    def overwritten(self) -> int:
        """Return up to which position of the ring the writer has overwritten, or may be doing so now."""
        counters = os.pread(self.fd, TOTALS.size, TOTAL_AT)
        return max(TOTALS.unpack(counters)) - RING if len(counters) == TOTALS.size else 0


def marker(left_out: int) -> bytes:
    """Return what stands in a result for bytes that are left out."""
    return b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""


def whole_characters(data: bytes) -> int:
    """Return the length of `data` without a UTF-8 sequence that its end cuts. Bytes that are no UTF-8 stay as they are."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
    return len(data)
