"""Starting one local sandbox: bubblewrap detached from the worker, init configured, the record written."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from activities.sandbox.port import BadSandboxSpec, SandboxUnavailable
from activities.sandbox.providers.local_bwrap import (
    AS_OWN_USER,
    AS_SAME_USER,
    ENVIRONMENT,
    STAGES,
    SYSTEM_PATH,
    Arguments,
    find_interpreter,
    own_user,
    sandbox_arguments,
)
from activities.sandbox.providers.local_cgroup import Groups, find_groups, group_prefix, join, remove_groups
from activities.sandbox.providers.local_seccomp import system_call_filter
from activities.sandbox.providers.local_state import Record, StateDirectory, end_process, host_identity, start_time
from activities.sandbox.providers.local_wire import VERSION, Inbox, receive, send
from contracts.sandbox import SandboxLimits

if TYPE_CHECKING:
    from activities.sandbox.providers.local_wire import Limits, Request

START_WITHIN = 20.0
"""Seconds until a sandbox that does not come up counts as failed."""

INSTALL = "install it (Debian and Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
NAMESPACES = (
    "this host does not let the worker make user namespaces; allow them (sysctl user.max_user_namespaces=10000, and where "
    "they exist kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0), or use another "
    "provider, such as docker"
)
REMEDIES = (
    ("No permissions to creat", NAMESPACES),
    ("Creating new namespace failed: Operation not permitted", NAMESPACES),
    ("setting up uid map", NAMESPACES),
    ("loopback: Failed RTM_NEWADDR", NAMESPACES),
    ("user namespaces", NAMESPACES),
    ("PR_SET_SECCOMP", "this kernel has no system call filters (CONFIG_SECCOMP_FILTER); use another provider, such as docker"),
    ("unshare: unshare failed", "a root worker needs CAP_SYS_ADMIN to start sandboxes; run it as an ordinary user instead"),
    ("setpriv:", "a root worker needs setpriv of util-linux to start sandboxes; run it as an ordinary user instead"),
    ("Unknown option", "this bubblewrap is too old; version 0.5 or newer is needed"),
)
"""(what the log says, what to do about it): the faults of a host that no retry mends."""


@dataclass(frozen=True)
class Tools:
    """The host's programs that start a sandbox."""

    bwrap: str
    can_disable_userns: bool
    groups: Groups


def find_tools(bwrap: str | None) -> Tools:
    """Find bubblewrap and what it can do. Raises BadSandboxSpec with a remedy when this host cannot have local sandboxes."""
    if sys.platform != "linux":
        raise BadSandboxSpec("provider: local needs Linux namespaces; on this system use the docker provider")
    found = shutil.which(bwrap or "bwrap", path=SYSTEM_PATH)
    if found is None:
        raise BadSandboxSpec(f"provider: local needs bubblewrap, and {bwrap or 'bwrap'} was not found: {INSTALL}")
    text = subprocess.run([found, "--help"], capture_output=True, text=True, check=False).stdout
    # The option writes to /proc/sys, which some containers show read-only.
    is_writable = not os.statvfs("/proc/sys").f_flag & os.ST_RDONLY
    system_call_filter()
    return Tools(found, "--disable-userns" in text and is_writable, find_groups())


def socket_path(directory: int) -> str:
    """Return a path to the control socket in an open directory that fits the 108 bytes of a socket address."""
    return f"/proc/self/fd/{directory}/control.sock"


def open_directory(path: Path) -> int:
    """Open a directory only to name what is in it."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def start_sandbox(
    state: StateDirectory,
    tools: Tools,
    sandbox_id: str,
    limits: SandboxLimits,
    *,
    environment: Mapping[str, str],
    labels: Mapping[str, str],
    queue: str,
) -> Record:
    """Start the sandbox `sandbox_id`, whose lock the caller holds, or leave nothing. Blocks its thread.

    Raises BadSandboxSpec when this host can never do it, SandboxUnavailable when it may later.
    """
    directory = state.staging(sandbox_id)
    (directory / "workspace").mkdir(0o755, parents=True)
    directory.chmod(0o700)
    (directory / "jobs").mkdir(0o700)
    held = open_directory(directory)
    nonce = secrets.token_hex(16)
    group = f"{group_prefix(state.root)}{sandbox_id}.{nonce[:8]}"
    groups: list[Path] = []
    try:
        groups = tools.groups.make(group, limits)
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as control:
            listener.bind(socket_path(held))
            listener.listen(128)
            pid = launch(tools, sandbox_id, limits, directory, listener)
            started = start_time(pid)
            try:
                if started is None:
                    raise SandboxUnavailable(fault_of(directory, "init ended at once"))
                join(groups, pid)  # before anything runs in it
                record = Record(
                    id=sandbox_id,
                    nonce=nonce,
                    queue=queue,
                    host=host_identity(),
                    pid=pid,
                    started=started,
                    created_at=time.time(),
                    labels=dict(labels),
                    environment=dict(environment),
                    groups=[str(path) for path in groups],
                    lifetime=limits.lifetime_seconds,
                )
                control.settimeout(START_WITHIN)
                control.connect(socket_path(held))
                configure: Request = {
                    "op": "configure",
                    "nonce": nonce,
                    "environment": {**ENVIRONMENT, **environment},
                    "limits": guest_limits(limits),
                }
                counter = tools.groups.open_oom_counter(group)
                try:
                    ask(control, configure, [] if counter is None else [counter])
                finally:
                    if counter is not None:
                        os.close(counter)
                state.save(directory, record)
                directory.rename(state.path(sandbox_id))
                # If this worker is killed before the next line, init ends, and the next one finds a dead sandbox here.
                ask(control, {"op": "commit", "nonce": record.nonce})
            except (OSError, ValueError) as error:
                raise SandboxUnavailable(fault_of(directory, f"init did not answer: {error}")) from error
            except BaseException:
                if started is not None:
                    end_process(pid, started)
                raise
    except BaseException as error:
        state.remove(sandbox_id)
        remove_groups(groups)
        if isinstance(error, OSError):
            raise SandboxUnavailable(f"the sandbox cannot be started: {error}") from error
        raise
    finally:
        os.close(held)
    return record


def guest_limits(limits: SandboxLimits) -> Limits:
    """Return the limits that are kept inside. Before Linux 5.14 processes were counted by user, and not by sandbox."""
    own = limits.model_dump(exclude={"cpus"})
    return {**own, "counts_processes": os.geteuid() == 0 or kernel_version() >= (5, 14)}  # type: ignore[typeddict-item]


def kernel_version() -> tuple[int, int]:
    """Return the version of the running kernel."""
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)))


def ask(control: socket.socket, request: Request, fds: Sequence[int] = ()) -> None:
    """Put one question of the start to init. Raises OSError when it does not agree."""
    request["version"] = VERSION
    send(control, request, fds)
    reply = receive(control, Inbox())
    if "error" in reply:
        raise ConnectionAbortedError(reply["message"])


def launch(tools: Tools, sandbox_id: str, limits: SandboxLimits, directory: Path, listener: socket.socket) -> int:
    """Start bubblewrap, which outlives this process, and return the pid of its init as this host sees it."""
    python = find_interpreter()
    workspace, prefix = directory / "workspace", python.prefix
    arguments = Arguments()
    info, info_writer = os.pipe()
    try:
        if os.geteuid() == 0:
            user = own_user(sandbox_id)
            os.chown(workspace, user, user)
            stages: list[str | Path] = [workspace, STAGES[0], prefix or STAGES[1], STAGES[1]]
            arguments.add("unshare", "--mount", "/bin/sh", "-c", AS_OWN_USER, "caisson", *stages)
            arguments.add("setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--")
            inner_workspace, inner_prefix = STAGES
        else:
            arguments.add("/bin/sh", "-c", AS_SAME_USER, "caisson")
            inner_workspace, inner_prefix = str(workspace), str(prefix)
        arguments.add(tools.bwrap, "--info-fd", info_writer)
        sandbox_arguments(
            arguments,
            workspace=inner_workspace,
            python=python,
            prefix=inner_prefix if prefix else None,
            disable_userns=tools.can_disable_userns,
            memory_mb=limits.memory_mb,
            listener=listener.fileno(),
        )
        with (directory / "log").open("ab") as log:
            # The shell puts bubblewrap into the background and ends, so that the host's init, not this worker, is its parent.
            subprocess.run(
                arguments.words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": SYSTEM_PATH},
                pass_fds=[*arguments.fds, info_writer, listener.fileno()],
                start_new_session=True,
                timeout=START_WITHIN,
                check=False,
            )
        os.close(info_writer)
        info_writer = -1
        return read_pid(info, directory)
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxUnavailable(f"the sandbox cannot be started: {error}") from error
    finally:
        arguments.close()
        os.close(info)
        if info_writer >= 0:
            os.close(info_writer)


def read_pid(info: int, directory: Path) -> int:
    """Wait for what bubblewrap tells of its child."""
    text = b""
    until = time.monotonic() + START_WITHIN
    while not text.rstrip().endswith(b"}"):
        if not select.select([info], [], [], max(0.0, until - time.monotonic()))[0]:
            raise SandboxUnavailable(fault_of(directory, "bubblewrap does not come up"))
        part = os.read(info, 4096)
        if not part:
            raise start_fault(directory)
        text += part
    return int(json.loads(text)["child-pid"])


def log_of(directory: Path) -> str:
    """Return the last lines that the start of a sandbox left."""
    try:
        return (directory / "log").read_text(errors="replace")[-2000:].strip()
    except FileNotFoundError:
        return ""


def fault_of(directory: Path, what: str) -> str:
    """Return `what` failed, with what the log says about it."""
    said = log_of(directory)
    return f"the sandbox cannot be started: {what}" + (f"; its log says: {said}" if said else "")


def start_fault(directory: Path) -> BadSandboxSpec | SandboxUnavailable:
    """Return the error for a bubblewrap that ended before there was a sandbox."""
    said = log_of(directory)
    for sign, remedy in REMEDIES:
        if sign in said:
            return BadSandboxSpec(f"provider: local cannot start a sandbox: {remedy} (the host said: {said})")
    return SandboxUnavailable(fault_of(directory, "bubblewrap failed"))
