"""The state directory of local sandboxes on one host: who lives there, locks, and removal.

<root>/<id>/           one sandbox; it stands there only when it is complete
    workspace/         the agent's files, bound at /workspace
    control.sock       where init listens
    scratch/          of the harness, while a workspace is restored
    jobs/<job>/        stdout, stderr, exit, and reads when it is a session
    state.json         a Record
    log                what bubblewrap and init said
    egress.json[l]     with a network policy: the proxy, and the record of connections (see local_egress)
<root>/.new-<id>/      one that is being made
<root>/.dead-<id>/     one that is being removed
<root>/locks/          locked files, held while a sandbox is made or removed; several ids may share one
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from activities.sandbox.port import SandboxUnavailable
from activities.sandbox.providers.local_cgroup import find_groups, group_prefix, is_empty, remove_groups
from contracts.sandbox import SandboxRef

DEATH_WITHIN_MS = 15_000
MAX_OPEN_DEPTH = 64


@cache
def host_identity() -> str:
    """Return what makes pids comparable: this boot of this host, and this process's pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def start_time(pid: int) -> int | None:
    """Return when a living process started, in clock ticks since boot (proc(5), field 22), or None when it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@dataclass(frozen=True)
class Record:
    """What is known of one sandbox. `pid` is its init as this host sees it; with `started` it can be no other process."""

    id: str
    nonce: str
    queue: str
    host: str
    pid: int
    started: int
    created_at: float
    labels: dict[str, str]
    environment: dict[str, str]
    groups: Sequence[str] = ()
    """The directories of its control groups."""
    lifetime: float | None = None
    """Seconds after `created_at` at which it ends itself."""

    def is_alive(self) -> bool:
        """Tell whether its init, and so the sandbox, is running."""
        return self.host == host_identity() and start_time(self.pid) == self.started

    def is_dead(self) -> bool:
        """Tell whether it surely is not. One in another pid namespace of this boot may live, unseen from here."""
        same_boot = self.host.partition("/")[0] == host_identity().partition("/")[0]
        return not same_boot or (self.host == host_identity() and not self.is_alive())

    def is_past_its_time(self) -> bool:
        """Tell whether its lifetime is over, which is then why it ended."""
        return self.lifetime is not None and time.time() >= self.created_at + self.lifetime

    def ref(self, provider: str) -> SandboxRef:
        """Return the handle on it."""
        ends = None if self.lifetime is None else self.created_at + self.lifetime
        return SandboxRef(provider=provider, id=self.id, nonce=self.nonce, queue=self.queue, expires_at=ends)


def end_process(pid: int, started: int) -> None:
    """Kill init and wait until the kernel has ended its whole pid namespace. Raises SandboxUnavailable.

    The process is held by a pidfd before its start time is compared, so a recycled pid is never hit. A dying init reports its
    end only when every process of its namespace is gone (pid_namespaces(7)).
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if start_time(pid) != started:
            return
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(DEATH_WITHIN_MS):
            raise SandboxUnavailable(f"process {pid} of the sandbox does not die; a file system may hang; try again later")
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def end_proxy(directory: Path) -> None:
    """Kill the proxy of a sandbox, which ends by itself too, but perhaps not at once."""
    with contextlib.suppress(FileNotFoundError):
        proxy = json.loads((directory / "egress.json").read_bytes())
        end_process(proxy["pid"], proxy["started"])


def remove_tree(directory: Path) -> None:
    """Remove a directory that sandboxed code wrote, whatever its modes, without following a link. Gone already is no error.

    `shutil.rmtree` stops at a directory without write permission and recurses as deep as the tree; this opens up each
    directory first, and goes through any depth.
    """
    try:
        top = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _remove(top, directory.name)
    finally:
        os.close(top)


def _remove(top: int, name: str) -> None:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=top)
            return
        fd = _open_up(top, name)
    except FileNotFoundError:
        return
    # The way down: an open directory, its name in the one before, and the directories in it that are still to be removed.
    way = [(fd, name, _empty(fd))]
    try:
        while way:
            fd, name, left = way[-1]
            if not left:
                way.pop()
                os.close(fd)
                os.rmdir(name, dir_fd=way[-1][0] if way else top)
                continue
            child = left.pop()
            opened = _open_up(fd, child)  # also before it is moved, which writes its '..'
            if len(way) < MAX_OPEN_DEPTH:
                way.append((opened, child, _empty(opened)))
                continue
            # Each level costs an open file, so a very deep tree is cut and what is cut off hung up at the top.
            os.close(opened)
            lifted = f".lifted-{os.urandom(8).hex()}"
            os.rename(child, lifted, src_dir_fd=fd, dst_dir_fd=way[0][0])
            way[0][2].append(lifted)
    finally:
        for fd, _, _ in way:
            os.close(fd)


def _open_up(parent: int, name: str) -> int:
    """Open a directory after giving this user all rights on it."""
    held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{held}", 0o700)  # noqa: PTH101 - the held directory, not a name that may be swapped
        return os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(held)


def _empty(fd: int) -> list[str]:
    """Unlink everything but directories in an open directory; return the names of those."""
    directories = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=fd)
    return directories


class StateDirectory:
    """The sandboxes of this host."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def id_for(key: str) -> str:
        """Return the id of the sandbox for `key`: the same on every call, safe as a file name."""
        return "local-" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    def path(self, sandbox_id: str) -> Path:
        """Return the directory of a sandbox. Raises ValueError for an id that was not made here."""
        if not sandbox_id.startswith("local-") or not sandbox_id[6:].isalnum():
            raise ValueError(f"{sandbox_id!r} is not the id of a local sandbox")
        return self.root / sandbox_id

    def staging(self, sandbox_id: str) -> Path:
        """Return where a sandbox is put together."""
        return self.root / f".new-{sandbox_id}"

    def load(self, sandbox_id: str) -> Record | None:
        """Return what is known of a sandbox, or None when there is none."""
        try:
            return Record(**json.loads((self.path(sandbox_id) / "state.json").read_bytes()))
        except FileNotFoundError:
            return None

    @staticmethod
    def save(directory: Path, record: Record) -> None:
        """Write the record of a sandbox that is being made."""
        (directory / "state.json").write_text(json.dumps(asdict(record)))

    @contextmanager
    def locked(self, sandbox_id: str, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of one id; with `wait=False`, give False when another holds it. Blocks its thread."""
        for directory in (self.root, self.root / "locks"):
            directory.mkdir(0o700, parents=True, exist_ok=True)
        # Lock files cannot be removed without a race, so there is a fixed number of them.
        name = self.path(sandbox_id).name.removeprefix("local-")[:3]
        lock = os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(lock)

    def remove(self, sandbox_id: str) -> None:
        """End what runs under an id and remove all of it. The caller holds the lock. Raises SandboxUnavailable."""
        record = self.load(sandbox_id)
        if record is not None and record.host == host_identity():
            end_process(record.pid, record.started)
            end_proxy(self.path(sandbox_id))
            remove_groups([Path(group) for group in record.groups])
        dead = self.root / f".dead-{sandbox_id}"
        remove_tree(dead)
        # Out of sight first: a removal that is cut off must not leave something that looks like a sandbox.
        if self.path(sandbox_id).exists():
            self.path(sandbox_id).rename(dead)
        remove_tree(dead)
        remove_tree(self.staging(sandbox_id))

    def sweep(self) -> None:
        """Remove what nobody can use: what makers and removers that were killed left behind, and sandboxes that died."""
        for path in self.root.glob("local-*"):
            with self.locked(path.name, wait=False) as ours:
                record = self.load(path.name) if ours else None
                if record is not None and record.is_dead():
                    self.remove(path.name)
        self.clear()

    def clear(self) -> None:
        """Remove what makers and removers that were killed left behind."""
        for left in [*self.root.glob(".dead-*"), *self.root.glob(".new-*")]:
            sandbox_id = left.name.partition("-")[2]
            with self.locked(sandbox_id, wait=False) as ours:
                if ours:
                    remove_tree(left)
        prefix = group_prefix(self.root)
        for group in find_groups().empty(prefix):
            with self.locked(group.name.removeprefix(prefix).partition(".")[0], wait=False) as ours:
                if ours and is_empty(group):  # else it may be waiting for the first process of a sandbox that is being made
                    remove_groups([group])

    def records(self) -> list[Record]:
        """Return every living sandbox."""
        found = [self.load(path.name) for path in sorted(self.root.glob("local-*"))]
        return [record for record in found if record is not None and record.is_alive()]
