"""The emulator's files: envd's HTTP `/files`, and `filesystem.Filesystem` but for watching."""

from __future__ import annotations

import asyncio
import gzip
from datetime import UTC, datetime
from email import message_from_bytes, policy
from typing import Any

from aiohttp import web

from tests.emulators.e2b.backing import HOMES
from tests.emulators.e2b.connect import RpcError, Unary, user_of
from tests.emulators.e2b.control import Box, api_error
from tests.emulators.e2b.faults import CUT, drop

_PIECE = 256 << 10
_TYPES = {"d": "FILE_TYPE_DIRECTORY", "-": "FILE_TYPE_FILE"}
_STAT = 'f=\'%s\\0%f\\0%A\\0%U\\0%G\\0%Y\\0\'; stat -L --printf $f "$1" 2>/dev/null || stat --printf $f "$1"'
_WRITE = """
umask 022; mkdir -p -- "$(dirname -- "$1")" || exit 3
[ ! -d "$1" ] || exit 4
cat > "$1" || exit 5
chown "$2": -- "$1" 2>/dev/null || exit 6
"""


def _path(request: web.Request, user: str) -> str:
    path = request.query.get("path", "")
    return path if path.startswith("/") else f"{HOMES[user]}/{path.removeprefix('~/')}"


async def download(box: Box, request: web.Request) -> web.StreamResponse:
    """Answer GET /files: with root's eyes, as envd does, whoever asks."""
    user = request.query.get("username", "user")
    if user not in HOMES:
        return api_error(401, f"error looking up user '{user}': user: unknown user {user}")
    path = _path(request, user)
    code, out, _ = await box.backing.do('test -e "$1" || exit 3; test -d "$1" && exit 4; exec cat -- "$1"', path)
    if code == 3:
        return api_error(404, f"path '{path}' does not exist")
    if code == 4:
        return api_error(400, f"path '{path}' is a directory")
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Content-Length": str(len(out))})
    await response.prepare(request)
    for number, start in enumerate(range(0, len(out), _PIECE)):
        if number == request.get(CUT):
            await asyncio.sleep(0.05)  # so that what was sent arrives
            drop(request)
            return response
        await response.write(out[start : start + _PIECE])
    return response


def _parts(kind: str, body: bytes) -> list[tuple[str, bytes]]:
    """Return the files of a multipart form, with their names."""
    form = message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body, policy=policy.HTTP)
    return [(part.get_filename() or "", part.get_payload(decode=True)) for part in form.iter_parts()]  # type: ignore[misc]


async def upload(box: Box, request: web.Request) -> web.StreamResponse:
    """Answer POST /files, of one file as it is or of a form of files: written by root, and given to the user."""
    user = request.query.get("username", "user")
    if user not in HOMES:
        return api_error(401, f"error looking up user '{user}': user: unknown user {user}")
    body = await request.read()
    if request.headers.get("Content-Encoding") == "gzip":
        body = gzip.decompress(body)
    kind = request.headers.get("Content-Type", "")
    files = _parts(kind, body) if kind.startswith("multipart/") else [("", body)]
    written = []
    for name, data in files:
        path = _path(request, user) if "path" in request.query else name
        code, _, err = await box.backing.do(_WRITE, path, user, stdin=data)
        if code == 4:
            return api_error(400, f"path is a directory: {path}")
        if code == 5 and b"No space left" in err:
            return api_error(507, f"attempted to write {len(data)} bytes: not enough disk space available")
        if code:
            return api_error(500, f"error writing file: {err.decode()}")
        written.append({"path": path, "name": path.rpartition("/")[2], "type": "file"})
    return web.json_response(written)


async def _entry(box: Box, path: str) -> dict[str, Any]:
    code, out, _ = await box.backing.do(_STAT, path)
    if code != 0:
        raise RpcError("not_found", f"file not found: {path}")
    size, mode, shown, owner, group, changed = out.decode().split("\0")[:6]
    _, target, _ = await box.backing.do('readlink -n -- "$1"', path)
    return {
        "name": path.rpartition("/")[2],
        "type": _TYPES.get(shown[0], "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": size,
        "mode": int(mode, 16) & 0o7777,
        "permissions": shown,
        "owner": owner,
        "group": group,
        "modifiedTime": datetime.fromtimestamp(int(changed), UTC).isoformat().replace("+00:00", "Z"),
        **({"isSymlink": True, "symlinkTarget": target.decode()} if target else {}),
    }


async def stat(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Describe a path."""
    return {"entry": await _entry(box, asked["path"])}


async def make_dir(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Make a directory and its parents."""
    code, _, err = await box.backing.do('[ ! -e "$1" ] || exit 3; mkdir -p -- "$1"', asked["path"], user=user_of(request))
    if code == 3:
        raise RpcError("already_exists", f"directory already exists: {asked['path']}")
    if code != 0:
        raise RpcError("internal", err.decode())
    return {"entry": await _entry(box, asked["path"])}


async def move(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Rename a path."""
    code, _, err = await box.backing.do('[ -e "$1" ] || exit 3; mv -T -- "$1" "$2"', asked["source"], asked["destination"])
    if code != 0:
        raise RpcError("not_found" if code == 3 else "internal", err.decode() or f"source file not found: {asked['source']}")
    return {"entry": await _entry(box, asked["destination"])}


async def list_dir(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """List a directory, and those below it down to a depth."""
    path, depth = asked["path"], asked.get("depth") or 1
    code, out, _ = await box.backing.do(
        '[ -e "$1" ] || exit 3; [ -d "$1" ] || exit 4; find "$1" -mindepth 1 -maxdepth "$2" -print0', path, str(depth)
    )
    if code in (3, 4):
        raise RpcError("not_found" if code == 3 else "invalid_argument", f"path is not a directory, or not there: {path}")
    names = sorted(name.decode() for name in out.split(b"\0") if name)
    return {"entries": [await _entry(box, name) for name in names]}


async def remove(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Remove a path and all below it."""
    await box.backing.do('rm -rf -- "$1"', asked["path"])
    return {}


UNARY: dict[str, Unary] = {"Stat": stat, "MakeDir": make_dir, "Move": move, "ListDir": list_dir, "Remove": remove}
