"""Running git as the harness: nobody's configuration, nothing of its own started, everything bounded, all of it gone with us."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from activities.store.port import StoreUnavailable
from activities.workspace.sources.git_access import Remote, Way
from contracts.base import BadInput

_PATH = "/usr/local/bin:/usr/bin:/bin"
_LEAST_VERSION = (2, 37)
"""The first with http.curloptResolve, without which an address that was checked is not the one that is reached."""
_KEPT_STDERR = 64 << 10
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_SHOWN = 300
_GUARD = """
exec 3<&0
"$@" </dev/null 3<&- & git=$!
{ read -r line; kill -KILL -$$; } <&3 3<&- >/dev/null 2>&1 & guard=$!
wait $git; code=$?
kill -KILL $guard; wait $guard 2>/dev/null
exit $code
"""
"""Runs a command and, when standard input ends since this worker was killed, kills it and all that it has started: git's helpers
would otherwise go on until the server has answered."""
SETTINGS = (
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("gc.auto", "0"),
    ("maintenance.auto", "false"),
    ("submodule.recurse", "false"),
    ("fetch.recurseSubmodules", "false"),
    ("fetch.unpackLimit", "1"),  # a pack is one file, whose growth can be watched
    ("transfer.bundleURI", "false"),
    ("pack.threads", "2"),
    # Larger files are passed on in pieces; windows bound what a process maps.
    ("core.bigFileThreshold", "1m"),
    ("core.packedGitWindowSize", "4m"),
    ("core.packedGitLimit", "16m"),
    ("advice.detachedHead", "false"),
)


@dataclass(frozen=True, slots=True)
class GitLimits:
    """Bounds on one entry: seconds for one command, seconds that a server may be silent, bytes that may come from it."""

    seconds: float = 1800
    quiet_seconds: int = 60
    download_bytes: int = 4 * 1024**3


class GitFailed(Exception):
    """A git command ended with an error; the text is what it said, without credentials. `is_silent`: it said nothing."""

    def __init__(self, said: str, code: int = 0) -> None:
        super().__init__(said or f"git ended with code {code}")
        self.is_silent = not said


class Git:
    """Starts git in one bare repository below `scratch`. Threads may use it at the same time."""

    def __init__(self, scratch: Path, limits: GitLimits, scrub: Callable[[str], str]) -> None:
        program = shutil.which("git", path=_PATH)
        if program is None:
            raise BadInput(
                "the tools worker's host has no `git` program; ask its operator to install it (Debian: apt-get install git)"
            )
        self._program = program
        self._scratch = scratch
        self._limits = limits
        self._scrub = scrub
        self._repository = scratch / "repository"
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_stopped = False

    def prepare(self, object_format: str) -> None:
        """Make the repository, for SHA-1 or SHA-256 names. Raises BadInput when git is too old."""
        if self._repository.exists():
            return
        said = self.run("version").decode(errors="replace")
        found = re.search(r"(\d+)\.(\d+)", said)
        if found is None or (int(found[1]), int(found[2])) < _LEAST_VERSION:
            raise BadInput(f"the tools worker's host has {said.strip()!r}; ask its operator to install git 2.37 or newer")
        self.run("init", "--quiet", "--bare", "--template=", f"--object-format={object_format}", "--", str(self._repository))

    def run(self, *arguments: str, way: Way | None = None, most: int = 1 << 20) -> bytes:
        """Run a command to its end and return its output. Raises what `stream` does, and BadInput for more than `most`."""
        output = bytearray()

        def take(data: bytes) -> None:
            output.extend(data)
            if len(output) > most:
                raise BadInput(f"git's answer to {arguments[0]} has more than {most} bytes")

        self.stream(take, *arguments, way=way)
        return bytes(output)

    def stream(self, take: Callable[[bytes], None], *arguments: str, way: Way | None = None) -> None:
        """Run a command, giving its output to `take` as it comes. Whatever `take` raises ends the command. Raises GitFailed,
        StoreUnavailable when it takes too long, and BadInput when it brings too much."""
        until = time.monotonic() + self._limits.seconds
        process = self._start(arguments, way or Way(), is_guarded=True)
        try:
            said = self._pump(process, take, until, is_watched=way is not None)
            if process.wait(max(1.0, until - time.monotonic())) != 0:
                raise GitFailed(self._scrub(said.decode(errors="replace")).strip(), process.returncode)
        except subprocess.TimeoutExpired:
            raise self._too_long() from None
        finally:
            self.discard(process)

    def _pump(self, process: subprocess.Popen[bytes], take: Callable[[bytes], None], until: float, *, is_watched: bool) -> bytes:
        said = b""
        with selectors.DefaultSelector() as selector:
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None  # noqa: S101 - both are pipes
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(_POLL_SECONDS):
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stdout:
                        take(data)
                    else:
                        said = (said + data)[-_KEPT_STDERR:]
                if time.monotonic() > until:
                    raise self._too_long()
                if is_watched and self._downloaded() > self._limits.download_bytes:
                    raise BadInput(
                        f"the repository sends more than {self._limits.download_bytes} bytes for this commit, the most that the "
                        "worker takes; give less of it in another way, or ask the worker's operator for more"
                    )
        return said

    def _downloaded(self) -> int:
        total = 0
        with contextlib.suppress(FileNotFoundError):
            for item in (self._repository / "objects" / "pack").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    total += item.stat().st_size
        return total

    def _too_long(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"git took longer than {self._limits.seconds:g} seconds; try again, or ask the worker's operator for more"
        )

    def objects(self) -> subprocess.Popen[bytes]:
        """Start the process that gives objects; closing its input ends it."""
        return self._start(("cat-file", "--batch"), Way(), is_guarded=False)

    def _start(self, arguments: Sequence[str], way: Way, *, is_guarded: bool) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_stopped:
                raise GitFailed("it was stopped")
            process = subprocess.Popen(
                [*(("sh", "-c", _GUARD, "git") if is_guarded else ()), self._program, *arguments],
                env=self._environment(way),
                cwd=self._scratch,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if is_guarded else subprocess.DEVNULL,
                pass_fds=way.fds,
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def _environment(self, way: Way) -> dict[str, str]:
        settings = [*SETTINGS, *way.settings]
        return {
            "PATH": _PATH,
            "HOME": str(self._scratch),
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            # Of the way's environment, the one protocol that is meant; never file://, git:// or ext::.
            "GIT_ALLOW_PROTOCOL": "none",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_LITERAL_PATHSPECS": "1",
            # Named, so that git looks for no repository around, and asks nobody whether it may trust this one.
            "GIT_DIR": str(self._repository),
            "GIT_CONFIG_COUNT": str(len(settings)),
            **{f"GIT_CONFIG_KEY_{number}": key for number, (key, _) in enumerate(settings)},
            **{f"GIT_CONFIG_VALUE_{number}": value for number, (_, value) in enumerate(settings)},
            **way.environment,
        }

    def stop(self) -> None:
        """Kill everything that runs, and start nothing more."""
        with self._lock:
            self._is_stopped = True
            running = list(self._running)
        for process in running:
            _kill(process)

    def discard(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process, if it runs, and let go of it."""
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with self._lock:
            self._running.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # The whole group: git's own children hold the connection.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Objects:
    """Contents of the repository's objects, through one process. Threads take turns."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def read(self, name: str, most: int, kind: str = "blob") -> bytes:
        """Return an object's content. Raises BadInput when it is larger than `most` or of another kind, else OSError."""
        parts: list[bytes] = []
        self.copy(name, parts.append, most, kind)
        return b"".join(parts)

    def copy(self, name: str, take: Callable[[bytes], object], most: int, kind: str = "blob") -> None:
        """Give an object's content to `take`, piece by piece. Raises what `read` does, and what `take` does."""
        with self._lock:
            if self._process is None:
                self._process = self._git.objects()
            try:
                _answer(self._process, name, take, most, kind)
            except BaseException:
                # The rest of its answer would be taken for the next one.
                self._discard()
                raise

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._discard()

    def _discard(self) -> None:
        if self._process is not None:
            self._git.discard(self._process)
            self._process = None


def _answer(process: subprocess.Popen[bytes], name: str, take: Callable[[bytes], object], most: int, kind: str) -> None:
    assert process.stdin is not None and process.stdout is not None  # noqa: S101 - both are pipes
    process.stdin.write(name.encode() + b"\n")
    process.stdin.flush()
    head = process.stdout.readline(200).split()
    if len(head) != 3:
        raise OSError(f"git has no object {name}" if head else "git ended while it read objects")
    left = int(head[2])
    if head[1].decode() != kind or left > most:
        raise BadInput(f"the object {name} is a {head[1].decode()} of {left} bytes, not a {kind} of at most {most}")
    while left:
        data = process.stdout.read(min(_CHUNK, left))
        if not data:
            raise OSError("git ended while it read objects")
        take(data)
        left -= len(data)
    process.stdout.read(1)


_CREDENTIAL = "the server does not let this credential read the repository"
_LATER: tuple[str, ...] = (
    r"returned error: (?:5\d\d|408|425|429)\b",
    r"Could not resolve host|Couldn't connect|Failed to connect|Connection (?:refused|reset|closed)|Network is unreachable",
    r"No route to host|Operation too slow|Timeout|timed out|early EOF|RPC failed|unexpected disconnect|hung up unexpectedly",
)
_FOREVER: tuple[tuple[str, str], ...] = (
    (r"could not read Username|terminal prompts disabled", "the server asks for a credential; name one in `secret`"),
    (
        r"returned error: 403|Authentication failed|HTTP 401|returned error: 401",
        f"{_CREDENTIAL}; give one with read access to `secret`",
    ),
    (
        r"Host key verification failed|host key .*changed|HOST IDENTIFICATION",
        "the server's key is not in `known_hosts` of the secret; check it",
    ),
    (
        r"Permission denied|Load key|error in libcrypto",
        f"{_CREDENTIAL}; give its key read access, or another key (without a passphrase)",
    ),
    (r"returned error: 3\d\d", "the server redirects to another URL, which is not followed; give that one"),
    (
        r"returned error: 4(?:04|10)\b|not found|does not appear to be a git repo|does not exist",
        "there is no such repository, or the credential may not see it",
    ),
    (r"[Cc]ertificate|self-signed", "the server's certificate is not trusted; ask the worker's operator for its authority"),
    (r"dumb http", "the server has git's old dumb HTTP only; it must run git-http-backend or the like"),
    (r"transport '.*' not allowed", "git may not use this kind of URL here"),
)


def raise_fault(remote: Remote, error: GitFailed) -> NoReturn:
    """Raise what a failure in talking to a server means. What is not known may go well another time."""
    text = str(error)
    shown = _shown(text)
    # A server that is failing first; then what a credential or URL is to blame for, after which connections are closed as well.
    for pattern in _LATER[:1]:
        if re.search(pattern, text):
            raise StoreUnavailable(f"{remote.url}: the server is busy or failing ({shown}); try again") from None
    for pattern, remedy in _FOREVER:
        if re.search(pattern, text):
            raise BadInput(f"{remote.url}: {remedy} ({shown})") from None
    for pattern in _LATER[1:]:
        if re.search(pattern, text):
            raise StoreUnavailable(f"{remote.url}: the connection failed ({shown}); try again") from None
    raise StoreUnavailable(f"{remote.url}: git failed ({shown}); try again") from None


def _shown(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"fatal|error|ssh|.*denied|.*failed", line)] or lines[-1:]
    return "".join(char if char.isprintable() else "?" for char in "; ".join(told))[-_SHOWN:]
