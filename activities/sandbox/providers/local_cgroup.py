"""The control group of each local sandbox: its memory, its number of processes and its share of the processors.

Each controller is taken from where this host has it, version 1 (a hierarchy of its own) or version 2 (the unified one), and
the groups are made below the worker's own, or with version 2 below its nearest ancestor that may hold them, so that limits
set on the worker hold for its sandboxes too. Where the worker may not make groups there are none; `enforcement` says so.
Formats: cgroups(7), and admin-guide/cgroup-v1 and cgroup-v2 of the kernel's documentation.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.sandbox import SandboxLimits

CONTROLLERS = ("memory", "pids", "cpu")
SPARE_PROCESSES = 64
"""For init, supervisors and file requests, beside the commands: those are held to the limit by RLIMIT_NPROC, and these must
still be able to start when the commands are at it."""
PERIOD_US = 100_000
REMOVED_WITHIN = 2.0
BASE = "caisson"
OOM_COUNTERS = {1: "memory.oom_control", 2: "memory.events"}


@dataclass(frozen=True)
class Groups:
    """Where each controller's groups of sandboxes are made, and in which version; a controller that is not here is missing."""

    places: Mapping[str, tuple[int, Path]] = field(default_factory=dict)

    def make(self, name: str, limits: SandboxLimits) -> list[Path]:
        """Make the groups of one sandbox with its limits and return their directories. Raises OSError, and leaves nothing."""
        made: list[Path] = []
        try:
            for controller, (version, base) in self.places.items():
                group = base / name
                if group not in made:
                    make_group(group)
                    made.append(group)
                for file, value in settings(controller, version, limits):
                    write_setting(group / file, value)
        except BaseException:
            remove_groups(made)
            raise
        return made

    def open_oom_counter(self, name: str) -> int | None:
        """Open the file in which the kernel counts what it ended for its memory. The caller closes it."""
        if "memory" not in self.places:
            return None
        version, base = self.places["memory"]
        return os.open(base / name / OOM_COUNTERS[version], os.O_RDONLY | os.O_CLOEXEC)

    def empty(self, prefix: str) -> list[Path]:
        """Return the groups whose name begins with `prefix` and that hold no process."""
        found = {group for _, base in self.places.values() for group in base.glob(f"{prefix}*")}
        return [group for group in sorted(found) if is_empty(group)]


def settings(controller: str, version: int, limits: SandboxLimits) -> list[tuple[str, str]]:
    """Return (file, value) for one controller. What is there on some kernels only has a name that begins with '?'."""
    size, quota = str(limits.memory_mb << 20), str(max(1000, int(limits.cpus * PERIOD_US)))
    processes = str(limits.processes + SPARE_PROCESSES)
    return {
        ("memory", 1): [("memory.limit_in_bytes", size), ("?memory.memsw.limit_in_bytes", size)],
        ("memory", 2): [("memory.max", size), ("?memory.swap.max", "0")],
        ("pids", 1): [("pids.max", processes)],
        ("pids", 2): [("pids.max", processes)],
        ("cpu", 1): [("cpu.cfs_period_us", str(PERIOD_US)), ("?cpu.cfs_quota_us", quota)],
        ("cpu", 2): [("?cpu.max", f"{quota} {PERIOD_US}")],
    }[controller, version]


def write_setting(path: Path, value: str) -> None:
    """Write one setting. An optional one may be missing, and a share of the processors is refused when the parent has less."""
    name = path.name.removeprefix("?")
    try:
        fd = os.open(path.with_name(name), os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if name == path.name:
            raise
        return
    try:
        os.write(fd, value.encode())
    except OSError as error:
        if name == path.name or error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def make_group(group: Path) -> None:
    """Make a group and the one above it, which another worker may be removing as empty."""
    for attempt in range(5):
        group.parent.mkdir(exist_ok=True)
        try:
            group.mkdir()
        except FileNotFoundError:
            if attempt == 4:
                raise
        else:
            return


def join(groups: Sequence[Path], pid: int) -> None:
    """Move a process, of which everything in the sandbox comes, into its groups. Raises OSError."""
    for group in groups:
        fd = os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(pid).encode())
        finally:
            os.close(fd)


def is_empty(group: Path) -> bool:
    """Tell whether a group holds no process; one that is gone does not."""
    try:
        return not (group / "cgroup.procs").read_bytes()
    except OSError:
        return True


def remove_groups(groups: Sequence[Path]) -> None:
    """Remove groups whose processes have ended. One that is still busy after a while stays for the next sweep."""
    until = time.monotonic() + REMOVED_WITHIN
    for group in groups:
        while True:
            try:
                group.rmdir()
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() >= until:
                    break
                time.sleep(0.002)
            else:
                break
        if not (group.parent / "cgroup.subtree_control").exists():  # version 2 would forget what it hands on
            with contextlib.suppress(OSError):  # others are in it
                group.parent.rmdir()


def enforcement(groups: Groups) -> dict[str, str]:
    """Return limit (as SandboxLimits names it) -> what enforces it on this host."""
    by_group = {name: f"control group (cgroup v{version})" for name, (version, _) in groups.places.items()}
    watched = "watched, four looks a second, so it may be passed for a moment"
    return {
        "memory_mb": by_group.get("memory", f"RLIMIT_DATA of each process; the sum is {watched}"),
        "processes": "RLIMIT_NPROC" + (f" and {by_group['pids']}" if "pids" in by_group else ""),
        "cpus": by_group.get("cpu", "nothing; the kernel shares the processors fairly between processes"),
        "open_files": "RLIMIT_NOFILE",
        "file_mb": "RLIMIT_FSIZE",
        "workspace_mb": watched,
        "workspace_files": watched,
        "lifetime_seconds": "the sandbox ends itself",
    }


def group_prefix(root: Path) -> str:
    """Return what the names of all groups of one state directory begin with."""
    return hashlib.sha256(os.fsencode(root)).hexdigest()[:12] + "."


def find_groups(proc: Path = Path("/proc/self")) -> Groups:
    """Find where this worker may make groups. `proc` is its directory in /proc."""
    own = {}
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own[names] = path
    places: dict[str, tuple[int, Path]] = {}
    unified: list[Path] = []
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = (unescaped(text) for text in before.split(" ")[3:5])
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" and "" in own:
            unified = ancestors(Path(point), root, own[""])
        elif kind == "cgroup":
            for names, path in own.items():
                for controller in set(names.split(",")) & set(CONTROLLERS) & set(options.split(",")):
                    chain = ancestors(Path(point), root, path)
                    if chain and can_make(chain[0]):
                        places[controller] = (1, chain[0] / BASE)
    missing = [name for name in CONTROLLERS if name not in places]
    for parent in unified:
        if can_make(parent) and (given := enable(parent, missing)):
            places |= dict.fromkeys(given, (2, parent / BASE))
            break
    return Groups({name: places[name] for name in CONTROLLERS if name in places})


def unescaped(text: str) -> str:
    """Return a path of mountinfo with its octal escapes resolved."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def ancestors(point: Path, root: str, path: str) -> list[Path]:
    """Return the directory of a group below its mount point and those above it, nearest first; none when it is not below."""
    relative = os.path.relpath(path, root)
    if relative.startswith(".."):
        return []
    here = point / relative
    return [here, *(parent for parent in here.parents if parent.is_relative_to(point))]


def can_make(parent: Path) -> bool:
    """Tell whether this worker may make groups there and move processes into them."""
    return all(os.access(path, os.W_OK) for path in (parent, parent / "cgroup.procs"))


def enable(parent: Path, wanted: Sequence[str]) -> list[str]:
    """Hand on controllers of version 2 from `parent` to the groups of sandboxes below it; return those that could be.

    A group that holds processes hands on none (the "no internal processes" rule), unless it is the root of all.
    """
    base = parent / BASE
    try:
        base.mkdir(exist_ok=True)
    except OSError:
        return []
    given = []
    for name in wanted:
        with contextlib.suppress(OSError):
            for group in (parent, base):
                if name not in (group / "cgroup.subtree_control").read_text().split():
                    (group / "cgroup.subtree_control").write_text(f"+{name}")
            given.append(name)
    if not given:
        with contextlib.suppress(OSError):
            base.rmdir()
    return given
