"""Content to and from sandboxes that have no Python: as tar archives, which every image can read and write.

Out of a sandbox comes a line "caisson-tar-1 now length\\n", that many bytes of paths that cannot be read, each with NUL
behind it, archives, and "caisson-tar-end\\n"; compressed with gzip where there is one.

Into it goes one archive: the directories, the files, and two files for the helper alone, `.caisson-digests` as `sha256sum -c`
reads it, and `.caisson-finish`, a script that makes the links, sets times and modes, and checks what the other cannot: names with
a newline or backslash, and the number of everything. Only a header of GNU tar has times below a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from activities.store.blobs import BlobStore
from activities.workspace.packs import Wanted, read_frames, unpack
from activities.workspace.remote_call import Helper, Keeps
from activities.workspace.remote_content import Spool
from activities.workspace.remote_listing import refuse, unsqueezed
from activities.workspace.remote_restore import PartWriter
from activities.workspace.remote_tree import Reading
from activities.workspace.tree import FILE, HARD_LINK, PERMISSIONS, SYMLINK, Directory, Entry, kept_time, walk

_CHUNK = 1 << 20
_BLOCK = 512
_TOUCHED = 100
"""Paths that one touch is given."""


class TarReader:
    """Takes a bundle of the helper in shell into a spool. Only regular files count, by the names that were asked for."""

    def __init__(self, spool: Spool, readings: Sequence[Reading], numbers: Sequence[int]) -> None:
        self._spool, self._readings = spool, readings
        self._numbers = {b"./" + readings[number].pending.path: number for number in numbers}
        self._unpacker: zlib._Decompress | None = None
        self._has_begun = False
        self._buffer = bytearray()
        self._now = -1
        self._closed = -1
        self._name = b""
        self._number = -1
        self._left = self._padding = self._offset = 0
        self._is_name = False

    def feed(self, data: bytes) -> None:
        """Take some bytes. Raises SandboxUnavailable for what no helper sends."""
        if not self._has_begun:
            self._has_begun, self._unpacker = True, unsqueezed(data)
        try:
            if self._unpacker is None:
                self._eat(data)
            while self._unpacker is not None and data:
                self._eat(self._unpacker.decompress(data, _CHUNK))
                data = self._unpacker.unconsumed_tail
        except (ValueError, zlib.error) as error:
            raise refuse(f"an archive that cannot be read: {error}") from error

    def end(self) -> None:
        """See that all of it has come."""
        if self._buffer != b"caisson-tar-end\n" or self._left or self._padding:
            raise refuse("a bundle that ends early")

    def _eat(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        if self._now < 0 or self._closed >= 0:
            at = self._preamble()
            if self._now < 0 or self._closed >= 0:
                return
        while at < len(buffer):
            if self._left or self._padding:
                part = bytes(buffer[at : at + min(self._left or self._padding, _CHUNK)])
                at += len(part)
                if self._left:
                    self._body(part)
                else:
                    self._padding -= len(part)
                continue
            if len(buffer) - at < 512:
                break
            self._header(bytes(buffer[at : at + 512]))
            at += 512
        del buffer[:at]

    def _preamble(self) -> int:
        if self._now < 0:
            end = self._buffer.find(b"\n", 0, 100)
            if end < 0:
                if len(self._buffer) >= 100:
                    raise ValueError("no beginning")
                return 0
            word, now, length = bytes(self._buffer[:end]).split(b" ")
            if word != b"caisson-tar-1":
                raise ValueError("no beginning")
            self._now, self._closed = int(now), int(length)
            del self._buffer[: end + 1]
            if self._closed > 64 << 20:
                raise ValueError("too many paths")
        if len(self._buffer) < self._closed:
            return 0
        for path in bytes(self._buffer[: self._closed]).split(b"\0"):
            if path in self._numbers:
                self._spool.received[self._numbers[path]].reason = "Permission denied"
        at, self._closed = self._closed, -1
        return at

    def _header(self, block: bytes) -> None:
        if not any(block):
            return
        if int(block[148:156].strip(b" \0") or b"0", 8) != sum(block) - sum(block[148:156]) + 8 * 32:
            raise ValueError("a damaged header")
        size, kind = _number(block[124:136]), block[156:157]
        if size < 0:
            raise ValueError("a size below 0")
        self._left, self._padding, self._offset = size, -size % 512, 0
        self._number, self._is_name = -1, kind == b"L"
        if self._is_name:
            if size > 1 << 16:
                raise ValueError("a name that is too long")
            self._name = b""
            return
        name, self._name = self._name or block[:100].partition(b"\0")[0], b""
        if kind in (b"0", b"\0", b"7") and name in self._numbers:
            self._begin(self._numbers.pop(name), size, _number(block[136:148]), _number(block[100:108]))
        elif kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
            self._left = self._padding = 0

    def _begin(self, number: int, size: int, mtime: int, mode: int) -> None:
        reading, received = self._readings[number], self._spool.begin(number)
        listed = reading.pending.entry
        self._number = number
        # Whole seconds are all that an archive has; the listing knows more, if the file is still the same.
        kept = kept_time(mtime * 10**9)
        is_same = size == listed.size and kept == listed.mtime // 10**9 * 10**9
        received.mtime = listed.mtime if is_same else kept
        received.is_sure = is_same and reading.ctime < self._now
        received.inode = reading.pending.inode
        received.is_there, received.mode = True, mode & PERMISSIONS
        if not size:
            self._spool.end(number, 0)

    def _body(self, part: bytes) -> None:
        self._left -= len(part)
        if self._is_name:
            self._name += part
            if not self._left:
                self._name = self._name.rstrip(b"\0")
        elif self._number >= 0:
            room = self._readings[self._number].pending.size - self._offset
            if room > 0:
                self._spool.write(self._number, self._offset, part[:room])
            self._offset += len(part)
            if not self._left:
                self._spool.end(self._number, min(self._offset, self._readings[self._number].pending.size))


class TarSender:
    """Sends a tree for the helper in shell. Files in one piece go as the store gives them; others are put together first."""

    def __init__(self, blobs: BlobStore, root: Directory, helper: Helper, part_bytes: int, keeps: Keeps) -> None:
        self._blobs, self._root, self._keeps = blobs, root, keeps
        self._out = PartWriter(helper, part_bytes)
        self._wanted: dict[bytes, Wanted] = {}
        self._uses: dict[bytes, list[tuple[bytes, Entry, int]]] = {}
        self._left: dict[bytes, int] = {}
        """Of a file in pieces: how many are still to come."""

    async def send(self, progress: Callable[[int], None] | None) -> tuple[int, str]:
        """Send all of it, and return how many parts it took and their digest. Raises StoreError or SandboxError."""
        with tempfile.TemporaryDirectory(prefix="caisson-restore-") as name:
            place = Path(name)
            await self._out.add(await asyncio.to_thread(self._begin, place))
            written = 0
            async for group in read_frames(self._blobs, list(self._wanted.values())):
                for item, stored in group:
                    data = bytes(await asyncio.to_thread(unpack, item, stored))
                    for path, entry, offset in self._uses[item.digest]:
                        await self._one(place, path, entry, offset, data)
                        written += 1
                if progress is not None:
                    progress(written)
        await self._out.add(bytes(2 * _BLOCK))
        return await self._out.end()

    async def _one(self, place: Path, path: bytes, entry: Entry, offset: int, data: bytes) -> None:
        if len(entry.pieces) == 1:
            await self._out.add(self._member(path, entry) + data + bytes(-len(data) % _BLOCK))
            return
        whole = _place(place, path)
        await asyncio.to_thread(_write_at, whole, offset, data)
        self._left[path] -= 1
        if not self._left[path]:
            await self._add_whole(whole, path, entry)

    async def _add_whole(self, whole: Path, path: bytes, entry: Entry) -> None:
        await self._out.add(self._member(path, entry))
        with await asyncio.to_thread(whole.open, "rb") as file:
            while data := await asyncio.to_thread(file.read, _CHUNK):
                await self._out.add(data)
        await self._out.add(bytes(-entry.size % _BLOCK))
        await asyncio.to_thread(whole.unlink)

    def _member(self, path: bytes, entry: Entry) -> bytes:
        is_exact = self._keeps.nanoseconds and "gnutar" in self._keeps.words
        return _header(b"./" + path, entry.size, entry.mode, entry.mtime if is_exact else entry.mtime // 10**9 * 10**9)

    def _begin(self, place: Path) -> bytes:
        """Return all that needs no content: the directories, empty files, and what the helper is to do in the end."""
        out: list[bytes] = []
        digests: list[bytes] = []
        script = Script(self._keeps, self._root)
        for path, entry in walk(self._root):
            script.add(path, entry)
            if isinstance(entry, Directory):
                out.append(_header(b"./" + path + b"/", 0, 0o700, 0, b"5"))
            elif entry.kind == FILE:
                if {10, 92} & set(path):
                    script.check(path, entry.digest)
                else:
                    digests.append(b"%s  ./%s\n" % (entry.digest.hex().encode(), path))
                self._plan(place, path, entry, out)
        for name, data in ((b"./.caisson-digests", b"".join(digests)), (b"./.caisson-finish", script.text())):
            out.append(_header(name, len(data), 0o600, 0) + data + bytes(-len(data) % _BLOCK))
        return b"".join(out)

    def _plan(self, place: Path, path: bytes, entry: Entry, out: list[bytes]) -> None:
        offset = 0
        real = [piece for piece in entry.pieces if piece.frame is not None]
        if not entry.size:
            out.append(self._member(path, entry))
        elif len(entry.pieces) > 1 or not real:
            whole = _place(place, path)
            with whole.open("xb") as file:
                file.truncate(entry.size)
            self._left[path] = len(real)
        if entry.size and not real:
            # Nothing but a hole: no piece of it will come.
            with whole.open("rb") as file:
                out.append(self._member(path, entry) + file.read() + bytes(-entry.size % _BLOCK))
        for piece in entry.pieces:
            if piece.frame is not None:
                self._wanted.setdefault(piece.digest, Wanted(piece.frame, piece.size, piece.digest))
                self._uses.setdefault(piece.digest, []).append((path, entry, offset))
            offset += piece.size


class Script:
    """The script that completes a tree which tar has unpacked. It runs in the tree; with "root" in the workspace, last of all."""

    def __init__(self, keeps: Keeps, root: Directory) -> None:
        self._keeps, self._root = keeps, root
        self._lines: list[bytes] = []
        self._last: list[bytes] = []
        self._times: dict[tuple[bytes, bytes], list[bytes]] = {}
        self._count = 0

    def add(self, path: bytes, entry: Entry | Directory) -> None:
        """Take one path of the tree, each directory before what it holds."""
        self._count += 1
        name = _quoted(b"./" + path)
        if isinstance(entry, Directory):
            self._touch(b"", entry.mtime, name)
            self._last.append(b"chmod %o %s" % (entry.mode, name))
        elif entry.kind == SYMLINK:
            self._lines.append(b"ln -s -- %s %s" % (_quoted(entry.target), name))
            if self._keeps.link_times:
                self._touch(b"-h ", entry.mtime, name)
        elif entry.kind == HARD_LINK:
            self._lines.append(b"ln %s %s" % (_quoted(b"./" + entry.target), name))
        elif "gnutar" not in self._keeps.words and (self._keeps.nanoseconds or entry.mtime < 0):
            # BusyBox takes a time before 1970 in an archive for 1970.
            self._touch(b"", entry.mtime, name)

    def check(self, path: bytes, digest: bytes) -> None:
        """See to a file whose name `sha256sum -c` cannot read."""
        self._lines.append(b'[ "$(sha256sum < %s)" = "%s  -" ]' % (_quoted(b"./" + path), digest.hex().encode()))

    def text(self) -> bytes:
        """Return the whole script."""
        own = self._at(self._root.mtime)
        lines = [
            b'if [ "$1" = root ]; then chmod %o . ; touch -d %s . ; exit; fi' % (self._root.mode, own),
            b"set -e",
            *self._lines,
            b'[ "$(($(find . ! -path . -print0 | tr -cd "\\000" | wc -c)))" = %d ]' % self._count,
        ]
        for (option, time), names in self._times.items():
            for start in range(0, len(names), _TOUCHED):
                # A file system that cannot hold a time still holds the files.
                lines.append(b"touch %s-d %s %s || :" % (option, time, b" ".join(names[start : start + _TOUCHED])))
        # Deepest first, since nothing below a directory can be reached once it is closed.
        return b"\n".join([*lines, *reversed(self._last), b""])

    def _touch(self, option: bytes, mtime: int, name: bytes) -> None:
        self._times.setdefault((option, self._at(mtime)), []).append(name)

    def _at(self, mtime: int) -> bytes:
        is_whole = not self._keeps.nanoseconds or not mtime % 10**9
        return b"@%d" % (mtime // 10**9) if is_whole else b"@" + _decimal(mtime)


def _quoted(text: bytes) -> bytes:
    return b"'" + text.replace(b"'", b"'\\''") + b"'"


def _place(place: Path, path: bytes) -> Path:
    return place / hashlib.sha256(path).hexdigest()


def _write_at(whole: Path, offset: int, data: bytes) -> None:
    with whole.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _decimal(time: int) -> bytes:
    """Return a time in seconds with a fraction. Of one before 1970 both count backwards."""
    return b"%s%d.%09d" % (b"-" if time < 0 else b"", *divmod(abs(time), 10**9))


def _header(name: bytes, size: int, mode: int, time: int, kind: bytes = b"0") -> bytes:
    """Return a header as GNU tar writes it, with what must come before it: a long name, and the nanoseconds of a time."""
    before = b""
    if time % 10**9:
        record = b" mtime=%s\n" % _decimal(time)
        length = len(record) + 2
        data = b"%d%s" % (length, record)
        before += _block(b"./pax", len(data), 0o600, 0, b"x") + data + bytes(-len(data) % _BLOCK)
    if len(name) > 100:
        data = name + b"\0"
        before += _block(b"././@LongLink", len(data), 0o600, 0, b"L") + data + bytes(-len(data) % _BLOCK)
    return before + _block(name[:100], size, mode, time // 10**9, kind)


def _block(name: bytes, size: int, mode: int, mtime: int, kind: bytes) -> bytes:
    size_field = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11)
    mtime_field = (
        b"%011o\0" % mtime if 0 <= mtime < 8**11 else (mtime % 256**11 | 0x80 << 88 | (mtime < 0) * (0x7F << 88)).to_bytes(12)
    )
    head = name.ljust(100, b"\0") + b"%07o\0" % mode + b"0000000\0" * 2 + size_field + mtime_field
    rest = kind + bytes(100) + b"ustar  \0"
    total = sum(head) + 8 * 32 + sum(rest)
    return (head + b"%06o\0 " % total + rest).ljust(_BLOCK, b"\0")


def _number(text: bytes) -> int:
    """Return a number of a tar header: octal, or in base 256 when its first bit is set; below 0 when its second is as well."""
    if text[0] & 0x80:
        return int.from_bytes(text[1:]) - (1 << 8 * len(text[1:]) if text[0] & 0x40 else 0)
    return int(text.strip(b" \0") or b"0", 8)
