"""Sandboxes that lie: listings and bundles that no helper writes are refused, and cost the worker nothing."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from activities.sandbox.port import SandboxQuota, SandboxUnavailable
from activities.workspace.remote_call import RemoteLimits
from tests.sandbox.local_support import Local
from tests.sandbox.remote_support import PortOnly, forged, keeper_at

HOSTILE: dict[str, Callable[[], bytes]] = {
    "no listing": lambda: b"nonsense",
    "empty": lambda: b"",
    "climbs": lambda: forged(rows=b"./..//81a4 1 5 3 1 1 1\n"),
    "climbs below": lambda: forged(rows=b"./a//41ed 2 6 1 1 1 1\n./a/..//81a4 1 5 3 1 1 1\n"),
    "no parent": lambda: forged(rows=b"./a/b//81a4 1 5 3 1 1 1\n"),
    "parent is a file": lambda: forged(rows=b"./a//81a4 1 6 1 1 1 1\n./a/b//81a4 1 5 3 1 1 1\n"),
    "twice": lambda: forged(rows=b"./a//81a4 1 5 3 1 1 1\n" * 2),
    "long name": lambda: forged(rows=b"./" + b"a" * 300 + b"//81a4 1 5 3 1 1 1\n"),
    "negative size": lambda: forged(rows=b"./a//81a4 1 5 -3 1 1 1\n"),
    "bad attributes": lambda: forged(attributes=b"./a\0zz=1\0"),
    "far time": lambda: forged(rows=b"./a//81a4 1 5 3 " + b"9" * 40 + b" 1 1\n"),
    "bomb": lambda: zlib.compress(bytes(600 << 20), 1, 31),
    "half": lambda: forged()[:30],
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_hostile_listings_are_refused(local: Local, tmp_path: Path, what: str) -> None:
    """What is no listing of a workspace is an error that names it; nothing is stored."""
    port, keeper = PortOnly(local.sandbox), keeper_at(tmp_path)
    port.on_read = lambda name, data: HOSTILE[what]()
    with pytest.raises(SandboxUnavailable, match="no proper answer"):
        await keeper.snapshot(port, None)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


async def test_a_size_that_is_a_lie_fills_no_disk(local: Local, tmp_path: Path) -> None:
    """A listing of more than the limits is refused before any content is asked for; a huge file is skipped."""
    port, keeper = PortOnly(local.sandbox), keeper_at(tmp_path)
    huge = b"".join(b"./f%d//81a4 1 %d %d 1 1 1\n" % (number, number + 5, 15 << 30) for number in range(5))
    port.on_read = lambda name, data: forged(rows=huge)
    with pytest.raises(SandboxQuota, match="is the most; leave large files out"):
        await keeper.snapshot(port, None)
    assert port.calls == ["list", "read listing"]
    port.on_read = lambda name, data: forged(rows=b"./f//81a4 1 5 %d 1 1 1\n" % (1 << 60))
    found = await keeper.store.load(await keeper.snapshot(port, None))
    assert found.skipped == ((b"f", f"larger than {RemoteLimits().file_bytes} bytes"),)


def frame(kind: bytes, data: bytes) -> bytes:
    """A frame of a bundle."""
    return kind + len(data).to_bytes(4) + data


BEGIN = b"caisson-bundle-1\n" + frame(b"N", b"1")
OPEN = frame(b"F", b"0 0 7 1 33188 1 ")
BUNDLES = {
    "more than listed": BEGIN + OPEN + frame(b"D", bytes(1000)),
    "bomb": BEGIN + OPEN + frame(b"C", zlib.compress(bytes(5 << 20))),
    "other file": BEGIN + frame(b"F", b"1 0 7 1 33188 1 "),
    "far away": BEGIN + OPEN + frame(b"S", b"99999999999") + frame(b"D", b"x"),
    "before": BEGIN + OPEN + frame(b"S", b"-5") + frame(b"D", b"x"),
    "ends": BEGIN + OPEN + frame(b"D", b"x"),
    "nothing": b"",
    "long frame": BEGIN + b"D\xff\xff\xff\xff",
    "end too far": BEGIN + OPEN + frame(b"E", b"99999999999 1") + frame(b"Z", b""),
    "content of none": BEGIN + frame(b"D", b"x"),
    "unknown": BEGIN + frame(b"?", b""),
    "more behind": BEGIN + frame(b"X", b"0 ") + frame(b"Z", b"") + frame(b"D", b"x"),
}


@pytest.mark.parametrize("what", BUNDLES)
async def test_hostile_bundles_are_refused(local: Local, tmp_path: Path, what: str) -> None:
    """Content that was not asked for, or more of it, is an error, and never a snapshot."""
    await local.sh("echo hello >f")
    port, keeper = PortOnly(local.sandbox), keeper_at(tmp_path)
    port.on_read = lambda name, data: BUNDLES[what] if name == "bundle" else data
    with pytest.raises(SandboxUnavailable, match=r"no proper answer|more than"):
        await keeper.snapshot(port, None, (".home/",))
