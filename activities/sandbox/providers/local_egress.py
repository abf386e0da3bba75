"""The network of a local sandbox: a socket inside of it, and a proxy process outside that accepts on it.

`egress.json` in the sandbox's directory holds its policy and which process the proxy is, `egress.jsonl` the record of its
connections. Whoever runs the proxy holds a lock on the open record, which the proxy inherits: so there is one proxy at a time,
and whether it lives is asked of the kernel. It ends with the sandbox, at the closing of the connection over which it came.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from activities.sandbox.port import BadSandboxSpec, SandboxUnavailable
from activities.sandbox.providers.local_bwrap import AS_SAME_USER, SYSTEM_PATH, own_user
from activities.sandbox.providers.local_start import log_of, open_directory, socket_path
from activities.sandbox.providers.local_state import Record, StateDirectory, end_process, start_time
from activities.sandbox.providers.local_wire import EGRESS_PORT, VERSION, Inbox, receive, send

if TYPE_CHECKING:
    from activities.sandbox.providers.local_wire import Request

START_WITHIN = 20.0
STOP_WITHIN_MS = 5000
PROXY = f"http://127.0.0.1:{EGRESS_PORT}"
ENVIRONMENT = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), PROXY),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1"),
    "NODE_USE_ENV_PROXY": "1",  # without it Node's own fetch does not look at the others (nodejs.org/api/cli.html)
}
"""What commands are told, when there is a network at all."""


class Egress:
    """Keeps the proxies of this host's sandboxes running. `command` starts one; empty: there is none."""

    def __init__(self, state: StateDirectory, command: Sequence[str]) -> None:
        self._state = state
        self._command = command

    def check(self, allow: Sequence[str]) -> None:
        """Refuse a policy that cannot be kept. Raises BadSandboxSpec."""
        if allow and not self._command:
            raise BadSandboxSpec("sandbox.network: this worker has no proxy, so its sandboxes have no network; leave `allow` out")

    def ensure(self, record: Record, allow: Sequence[str] = ()) -> None:
        """See to it that a living sandbox with a policy has its proxy. `allow` is the policy of one just made. Blocks its thread.

        Raises SandboxUnavailable, also when the sandbox dies meanwhile.
        """
        directory = self._state.path(record.id)
        try:
            known = read_egress(directory)
            if known is None and not allow:
                return
            log = os.open(directory / "egress.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                try:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return  # it lives, or another one starts it just now
                self._start(directory, record, allow if known is None else known["allow"], log)
            finally:
                os.close(log)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            said = log_of(directory)
            raise SandboxUnavailable(
                f"the proxy of sandbox {record.id} cannot be started: {error}; its log says: {said}"
            ) from error

    def read_log(self, record: Record) -> bytes:
        """End the proxy, so that the record is whole, and return it. Blocks its thread."""
        directory = self._state.path(record.id)
        known = read_egress(directory)
        if known is None:
            return b""
        stop(known["pid"], known["started"])
        try:
            return (directory / "egress.jsonl").read_bytes()
        except FileNotFoundError:
            return b""

    def _start(self, directory: Path, record: Record, allow: Sequence[str], log: int) -> None:
        listener, lifeline = request_listener(directory, record)
        ours, theirs = socket.socketpair()
        with ours, theirs, listener, lifeline:
            ours.settimeout(START_WITHIN)
            given = {"--listener": listener.fileno(), "--log": log, "--lifeline": lifeline.fileno(), "--hello": theirs.fileno()}
            words = ["/bin/sh", "-c", AS_SAME_USER, "caisson", *self._command]
            words += [str(word) for pair in given.items() for word in pair]
            if os.geteuid() == 0:
                # Neither root nor the sandbox's user, whose limit on processes the sandbox may use up.
                words += ["--user", str(own_user(f"egress of {record.id}"))]
            with (directory / "log").open("ab") as errors:
                # As with the sandbox itself: the shell ends, so that this worker is not the parent. Nothing of its
                # environment goes along.
                subprocess.run(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    cwd="/",
                    env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
                    pass_fds=list(given.values()),
                    start_new_session=True,
                    timeout=START_WITHIN,
                    check=True,
                )
            theirs.close()
            pid = int(ours.makefile().readline() or "0")
            started = start_time(pid) if pid else None
            if started is None:
                raise ChildProcessError("it ended at once")
            write_egress(directory, allow, pid, started)
            # Only now is it told to begin: a proxy that serves is always one that is written down.
            ours.sendall(json.dumps({"allow": list(allow)}).encode())


def request_listener(directory: Path, record: Record) -> tuple[socket.socket, socket.socket]:
    """Ask init for the listening socket inside; return it, and the connection that closes when the sandbox ends."""
    lifeline, inbox = socket.socket(socket.AF_UNIX), Inbox()
    try:
        lifeline.settimeout(START_WITHIN)
        held = open_directory(directory)
        try:
            lifeline.connect(socket_path(held))
        finally:
            os.close(held)
        request: Request = {"version": VERSION, "nonce": record.nonce, "op": "egress"}
        send(lifeline, request)
        reply = receive(lifeline, inbox)
        if "error" in reply or len(inbox.fds) != 1:
            raise ConnectionAbortedError(reply.get("message", "init gave no socket"))
        return socket.socket(fileno=inbox.fds.pop()), lifeline
    except BaseException:
        inbox.close_fds()
        lifeline.close()
        raise


def read_egress(directory: Path) -> dict[str, Any] | None:
    """Return the policy and the proxy of a sandbox, or None when it has no network."""
    try:
        known: dict[str, Any] = json.loads((directory / "egress.json").read_bytes())
    except FileNotFoundError:
        return None
    return known


def write_egress(directory: Path, allow: Sequence[str], pid: int, started: int) -> None:
    """Write them down, whole at every moment."""
    new = directory / "egress.json.new"
    new.write_text(json.dumps({"allow": list(allow), "pid": pid, "started": started}))
    new.replace(directory / "egress.json")


def stop(pid: int, started: int) -> None:
    """End a proxy, giving it time to write down what goes on. One that is gone is no error."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if start_time(pid) == started:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(STOP_WITHIN_MS)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)
    end_process(pid, started)
