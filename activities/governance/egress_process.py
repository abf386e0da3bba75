"""The process that a sandbox's proxy runs in: apart from every worker, so that it outlives them, and with no rights of its own.

It is given open files only: `--listener` the socket in the sandbox, `--log` the record, `--lifeline` a connection that closes
when the sandbox ends, and `--hello` a socket over which it tells its pid and then gets its policy as JSON. So whoever starts it
can write down the pid before it does anything; if the starter dies first, it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures.thread  # noqa: F401 - loaded now, since later this process may not read its own code
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from activities.governance.egress import Limits, Proxy, resolve
from activities.governance.egress_log import EgressLog
from activities.governance.egress_policy import HTTP_PORTS, TLS_PORTS, EgressPolicy, Network, parse_networks

BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from activities.governance.egress_process import main; main(sys.argv[1:])"
OPEN_FILES = 4 * Limits.connections
RESOLVING = 4
"""Names being resolved at a time."""
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
"""From linux/prctl.h."""


def proxy_command(private: Sequence[Network] = (), options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command that a sandbox provider starts a proxy with; it adds the open files. `private`: opened ranges."""
    ranges = ",".join(map(str, private))
    return (sys.executable, "-I", "-c", BOOT, str(Path(__file__).parents[2]), "--private", ranges, *options)


def main(arguments: Sequence[str]) -> None:
    """Be the proxy of one sandbox until it ends."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--listener", "--log", "--lifeline", "--hello"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--user", type=int, help="the user and group to become, when started as root")
    parser.add_argument("--private", type=parse_networks, default=(), help="ranges that may be reached though not public")
    parser.add_argument("--tls-port", type=int, action="append", help="instead of 443")
    parser.add_argument("--http-port", type=int, action="append", help="instead of 80")
    parser.add_argument("--resolve", action="append", default=[], metavar="NAME=ADDRESS,...", help="do not ask for this name")
    given = parser.parse_args(arguments)
    give_up_rights(given.user)
    with socket.socket(fileno=given.hello) as hello:
        hello.sendall(f"{os.getpid()}\n".encode())
        allow = read_allow(hello)
    if allow is None:
        return
    policy = EgressPolicy(allow, given.private, frozenset(given.tls_port or TLS_PORTS), frozenset(given.http_port or HTTP_PORTS))
    fixed = {name: addresses.split(",") for name, _, addresses in (pair.partition("=") for pair in given.resolve)}

    async def known_or_resolved(host: str, port: int) -> Sequence[str]:
        return fixed[host] if host in fixed else await resolve(host, port)

    listener, lifeline = socket.socket(fileno=given.listener), socket.socket(fileno=given.lifeline)
    asyncio.run(serve(Proxy(policy, EgressLog(given.log), resolver=known_or_resolved), listener, lifeline))


def give_up_rights(user: int | None) -> None:
    """Become a user that owns nothing, and make sure that neither this process nor its memory is of use to others."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for option, value in ((PR_SET_NO_NEW_PRIVS, 1), (PR_SET_DUMPABLE, 0)):
        if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
    os.chdir("/")


def read_allow(hello: socket.socket) -> tuple[str, ...] | None:
    """Read the policy's hosts, or None when the starter died."""
    text = b""
    while part := hello.recv(1 << 16):
        text += part
    return tuple(json.loads(text)["allow"]) if text else None


async def serve(proxy: Proxy, listener: socket.socket, lifeline: socket.socket) -> None:
    """Run the proxy until the lifeline closes or SIGTERM comes."""
    loop = asyncio.get_running_loop()
    # What a sandbox provokes is in the bounded record; it must not fill the host's disk through the error stream.
    loop.set_exception_handler(lambda _, __: None)
    loop.set_default_executor(ThreadPoolExecutor(RESOLVING))
    end = asyncio.Event()
    lifeline.setblocking(False)
    loop.add_reader(lifeline, end.set)  # nothing is ever said on it, so anything means its end
    loop.add_signal_handler(signal.SIGTERM, end.set)
    await proxy.start(listener)
    await end.wait()
    loop.remove_reader(lifeline)
    await proxy.stop()
    os._exit(0)  # not through the executor's end, which waits for a name server
