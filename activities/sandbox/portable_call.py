"""Calling the helper inside a sandbox through its machine, whatever its image has.

One call is one script, which runs one operation of the helper and says how it went between two marks on its standard output, so
that what a login shell says around it does no harm. A short answer comes there too, in base64; a longer one is left in a file:

    caisson-1 inline                    or    caisson-1 file BYTES
    BASE64...
    caisson-1 end                             caisson-1 end

The answer is a line of JSON, and bytes that it tells the lengths of. What does not fit into a script (standard input, the content
of files, a long command) is put into a file first.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import json
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from activities.sandbox.machine import STATE, Machine
from activities.sandbox.port import LONG_LINE, FileFault, SandboxGone, SandboxUnavailable, SessionFault
from contracts.sandbox import WORKSPACE

HELPER = Path(__file__).parent / "portable_helper"
PACKAGE = "activities/sandbox/portable_helper"
PYTHON = ("wire", "process", "stream", "supervise", "jobs", "reads", "files", "main")
SHELL = ("common", "helper", "supervise", "files")
SCRIPT_LIMIT = 48_000
"""Bytes of a script that go as they are: with a provider's quotes around it they stay below what an argument may have."""
MARGIN = 30.0
"""Seconds that a call may take beside the waiting that it is asked for."""
MOST = 1 << 30
"""Bytes that an answer may have. Nothing that the harness asks for comes near."""

SESSION_FAULTS = {
    "unknown": "there is no such session in this sandbox",
    "ended": "it has ended, so it takes no input",
    "no terminal": "it has no terminal, so it takes no input; start the command with one",
    "line": LONG_LINE,
    "busy": "it does not read what is typed, and more than this is not kept for it; read what it says, or end it",
}

_ANSWER = re.compile(rb"^caisson-1 (inline|file (\d+))\r?\n(.*?)^caisson-1 end\r?$", re.MULTILINE | re.DOTALL)
_HELLO = re.compile(rb"^caisson-1 hello (\S*) (\S+) (\S+) (\S+)\r?$", re.MULTILINE)

_PROBE = "import base64, ctypes, fcntl, json, select, socket, struct, sys, termios; sys.exit(sys.version_info < (3, 6))"


_ROOM = f"""rm -f {{path}} {STATE}/reserve
dd if=/dev/zero of={{path}} bs={{size}} count=1 2>/dev/null || printf 'full\\n'
rm -f {{path}}
"""
"""Gives up the reserve, and says whether there is still too little room for what did not arrive."""


class HelperSilent(SandboxUnavailable):
    """The helper ended without a word: a command of the sandbox may have killed it."""


@dataclass(frozen=True)
class Image:
    """What the image of a sandbox has that the helper works with."""

    python: str | None
    """Where Python 3.6 or newer is, if it is anywhere."""
    has_bash: bool


@dataclass(frozen=True)
class Hello:
    """What a first look at a machine finds."""

    nonce: str
    """Empty when the machine was not prepared."""
    image: Image
    has_helper: bool


@dataclass(frozen=True)
class Answer:
    """What an operation of the helper said."""

    words: Mapping[str, Any]
    body: bytes

    def parts(self, lengths: Sequence[int | None]) -> list[bytes | None]:
        """Return the body cut into parts of the given lengths, None where there is no length."""
        parts: list[bytes | None] = []
        at = 0
        for length in lengths:
            parts.append(None if length is None else self.body[at : at + length])
            at += length or 0
        return parts


def helper_files(image: Image) -> dict[str, str]:
    """Return the helper for an image: path below its directory -> text."""
    if image.python is not None:
        return {f"{PACKAGE}/{name}.py": (HELPER / f"{name}.py").read_text() for name in PYTHON}
    return {f"{name}.sh": (HELPER / f"{name}.sh").read_text() for name in SHELL}


@cache
def helper_place() -> str:
    """Return the directory of this version of the helper."""
    texts = [path.read_bytes() for path in sorted(HELPER.iterdir()) if path.suffix in (".py", ".sh")]
    return f"{STATE}/helper-{hashlib.sha256(b''.join(texts)).hexdigest()[:16]}"


def here_document(path: str, text: str) -> str:
    """Return the commands of a script that write a file: whole or not at all, as others may be writing and using it."""
    end = "CAISSON-END"
    while end in text:
        end += "-"
    return f"cat >{path}.$$ <<'{end}'\n{text.rstrip(chr(10))}\n{end}\nmv -f {path}.$$ {path}\n"


async def say_hello(machine: Machine) -> Hello:
    """Look at a machine: whose it is, and what its image has. Makes the directories of the harness."""
    script = f"""umask 077
mkdir -p {STATE}/jobs {STATE}/in {STATE}/out
python=$(command -v python3) && "$python" -I -S -c '{_PROBE}' 2>/dev/null || python=-
command -v bash >/dev/null 2>&1 && bash=yes || bash=no
[ -e {helper_place()}/ready ] && helper=yes || helper=no
printf '\\ncaisson-1 hello %s %s %s %s\\n' "$(cat {STATE}/nonce 2>/dev/null)" "$python" "$bash" "$helper"
"""
    ran = await machine.run(script, timeout=MARGIN)
    found = _HELLO.search(ran.stdout)
    if found is None:
        raise _silent(machine, ran.stdout, ran.stderr, ran.exit_code)
    nonce, python, bash, helper = (word.decode("utf-8", "replace") for word in found.groups())
    image = Image(None if python == "-" else python, bash == "yes")
    return Hello(nonce, image, helper == "yes")


async def install(machine: Machine, image: Image, commands: str = "") -> None:
    """Put the helper into the sandbox, and run `commands` there in the end. Raises SandboxUnavailable when that fails."""
    files = helper_files(image)
    place = helper_place()
    folders = " ".join(sorted({f"{place}/{path}".rpartition("/")[0] for path in files}))
    lines = ["set -e", "umask 077", f"mkdir -p {folders}"]
    lines += [here_document(f"{place}/{path}", text) for path, text in files.items()]
    lines += [f": >{place}/ready", commands]
    bundle = f"{STATE}/in/install-{secrets.token_hex(8)}"
    await machine.put(bundle, "\n".join(lines).encode())
    ran = await machine.run(f"sh {bundle} && printf '\\ncaisson-1 ready\\n'; rm -f {bundle}", timeout=2 * MARGIN)
    if b"\ncaisson-1 ready" not in ran.stdout:
        raise _silent(machine, ran.stdout, ran.stderr, ran.exit_code)


def _silent(machine: Machine, stdout: bytes, stderr: bytes, code: int) -> HelperSilent:
    tail = (stderr or stdout)[-300:].decode("utf-8", "replace")
    return HelperSilent(f"the helper in sandbox {machine.ref.id} ended without a word (exit code {code}): {tail!r}")


class Caller:
    """Calls the helper in one sandbox whose image is known."""

    def __init__(self, machine: Machine, image: Image) -> None:
        self._machine = machine
        self.image = image
        self._fetched: list[str] = []

    async def call(self, operation: str, given: Mapping[str, Any], words: Sequence[str | int], wait: float = 0.0) -> Answer:
        """Do one operation: `given` is what the helper in Python takes, `words` what the one in shell takes.

        Raises FileFault, SessionFault and SandboxError.
        """
        name = secrets.token_hex(8)
        script = await self._script(operation, name, given, words)
        fetched, self._fetched = self._fetched, []
        lines = [
            f"[ -e {helper_place()}/ready ] || {{ printf '\\ncaisson-1 absent\\n'; exit 1; }}",
            *([f"rm -f {' '.join(fetched)}"] if fetched else []),
            script,
        ]
        ran = await self._machine.run("\n".join(lines), timeout=wait + MARGIN)
        found = _ANSWER.search(ran.stdout)
        if found is None:
            if b"\ncaisson-1 absent" in ran.stdout:
                raise SandboxGone(f"sandbox {self._machine.ref.id} lost {STATE}, and with it what the harness knows of its jobs")
            raise _silent(self._machine, ran.stdout, ran.stderr, ran.exit_code)
        try:
            data = await self._fetch(name, int(found[2])) if found[2] else base64.b64decode(found[3])
            line, _, body = data.partition(b"\n")
            answer = Answer(json.loads(line), body)
        except (ValueError, binascii.Error) as error:
            raise SandboxUnavailable(f"the helper in sandbox {self._machine.ref.id} cannot be understood: {error}") from error
        fault = answer.words.get("fault")
        if fault is None:
            return answer
        text = str(answer.words.get("text") or body.decode("utf-8", "backslashreplace"))[:2000]
        if fault == "file":
            raise FileFault(text)
        if fault == "session":
            raise SessionFault(SESSION_FAULTS.get(text, text))
        raise SandboxUnavailable(f"sandbox {self._machine.ref.id}: {text}")

    async def put(self, data: bytes) -> str:
        """Put content into the sandbox and return where it is. Raises FileFault when its disk is too full."""
        path = f"{STATE}/in/{secrets.token_hex(8)}"
        try:
            await self._machine.put(path, data)
        except (FileFault, SandboxUnavailable):
            if b"full" in (await self._machine.run(_ROOM.format(path=path, size=len(data)), timeout=MARGIN)).stdout:
                raise FileFault(f"{STATE}: {os.strerror(errno.ENOSPC)}") from None
            await self._machine.put(path, data)
        return path

    async def _fetch(self, name: str, size: int) -> bytes:
        path = f"{STATE}/out/{name}"
        if size > MOST:
            raise ValueError(f"an answer of {size} bytes")
        self._fetched.append(path)
        data = bytearray()
        try:
            async for part in self._machine.get(path):
                data += part
                if len(data) > size:
                    raise ValueError(f"more than the {size} bytes of its answer")
        except FileFault as fault:
            raise SandboxUnavailable(
                f"what the helper in sandbox {self._machine.ref.id} wrote cannot be read: {fault}"
            ) from fault
        if len(data) < size:
            raise ValueError(f"{len(data)} of the {size} bytes of its answer")
        return bytes(data)

    async def _script(self, operation: str, name: str, given: Mapping[str, Any], words: Sequence[str | int]) -> str:
        if self.image.python is not None:
            request = json.dumps({**given, "op": operation, "state": STATE, "workspace": WORKSPACE, "id": name})
            if len(request) > SCRIPT_LIMIT:
                request = "@" + await self.put(request.encode())
            main = f"{helper_place()}/{PACKAGE}/main.py"
            # Only what starts a command needs its variables, which may be anything.
            begin = f". {STATE}/environment\n" if operation == "exec" else ""
            return f"{begin}exec {shlex.quote(self.image.python)} -I -S {main} {shlex.quote(request)}"
        head = f"exec sh {helper_place()}/helper.sh {operation} {STATE} {WORKSPACE} {name}"
        script = " ".join([head, *(shlex.quote(str(word)) for word in words)])
        if len(script) <= SCRIPT_LIMIT and script.isascii():
            return script
        # Names are bytes that a provider's SDK may not carry in a script.
        return f". {await self.put(script.encode('utf-8', 'surrogateescape'))}"
