"""The real git behind a small HTTP server, and what processes and files it leaves."""

from __future__ import annotations

import base64
import contextlib
import http.server
import ipaddress
import os
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from activities.workspace.sources.git import GitSource
from activities.workspace.sources.git_access import GitReach
from activities.workspace.sources.port import Found

TOKEN = "canary-7f3a-git"
FORMS = (TOKEN, base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode(), "canary%2D7f3a%2Dgit")
"""Of the case SE03."""
LOCAL = GitReach(private=(ipaddress.ip_network("127.0.0.0/8"),), allow_http=True)
WHEN = "1700000000 +0000"
NOBODY = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": "file",
    **{
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "n"), ("EMAIL", "e@x"), ("DATE", WHEN))
    },
}


class Server:
    """Serves the repositories of a directory. Counts what it answers, and misbehaves as it is told."""

    def __init__(self, root: Path, tls: tuple[Path, Path] | None = None) -> None:
        self.root = root
        self.token = ""
        self.speaks_v2 = True
        self.status = 0
        self.location = ""
        self.delay = 0.0
        self.said = b""
        self.asked: list[str] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def do_POST(self) -> None:
                outer.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Quiet(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        self.asked.append(handler.path)
        length = int(handler.headers.get("Content-Length", 0))
        body = handler.rfile.read(length)
        if (
            self.token
            and handler.headers.get("Authorization", "")
            != "Basic " + base64.b64encode(f"x-access-token:{self.token}".encode()).decode()
        ):
            self._plain(handler, 401, ("WWW-Authenticate", 'Basic realm="git"'))
            return
        if self.delay and handler.path.endswith("git-upload-pack"):
            time.sleep(self.delay)
        if self.status:
            self._plain(handler, self.status, *([("Location", self.location)] if self.location else []))
            return
        path, _, query = handler.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": handler.command,
            "CONTENT_LENGTH": str(length),
            "CONTENT_TYPE": handler.headers.get("Content-Type", ""),
            "REMOTE_ADDR": "127.0.0.1",
            "HTTP_CONTENT_ENCODING": handler.headers.get("Content-Encoding", ""),
            "GIT_CONFIG_GLOBAL": "/dev/null",
        }
        if self.speaks_v2:
            environment["GIT_PROTOCOL"] = handler.headers.get("Git-Protocol", "")
        done = subprocess.run(["git", "http-backend"], env=environment, input=body, capture_output=True, check=False)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        fields = [line.split(": ", 1) for line in head.decode().split("\r\n") if line]
        status = next((int(value.split()[0]) for name, value in fields if name == "Status"), 200)
        handler.send_response(status)
        for name, value in fields:
            if name != "Status":
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def _plain(self, handler: http.server.BaseHTTPRequestHandler, status: int, *fields: tuple[str, str]) -> None:
        handler.send_response(status)
        for name, value in (*fields, ("Content-Type", "text/plain"), ("Content-Length", str(len(self.said)))):
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(self.said)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Repository:
    """A bare repository of the server, and what puts objects into it."""

    def __init__(self, path: Path, object_format: str = "sha1") -> None:
        self.path = path
        subprocess.run(
            ["git", "init", "-q", "--bare", "-b", "main", f"--object-format={object_format}", str(path)], env=NOBODY, check=True
        )

    def git(self, *arguments: str, data: bytes = b"", when: str = WHEN) -> str:
        environment = {**NOBODY, "GIT_DIR": str(self.path), "GIT_COMMITTER_DATE": when}
        return (
            subprocess.run(["git", *arguments], env=environment, input=data, capture_output=True, check=True)
            .stdout.decode()
            .strip()
        )

    def blob(self, data: bytes) -> str:
        return self.git("hash-object", "-w", "--stdin", data=data)

    def tree(self, *rows: tuple[str, str, bytes]) -> str:
        """Make a tree of (mode, object, name), whatever git thinks of it."""
        raw = b"".join(mode.encode() + b" " + name + b"\0" + bytes.fromhex(made) for mode, made, name in rows)
        return self.git("hash-object", "-w", "-t", "tree", "--literally", "--stdin", data=raw)

    def commit(self, tree: str, branch: str = "main", parent: str = "", when: str = WHEN) -> str:
        made = self.git("commit-tree", tree, "-m", "m", *(("-p", parent) if parent else ()), when=when)
        self.git("update-ref", f"refs/heads/{branch}", made)
        return made

    def files(self, files: dict[str, bytes], branch: str = "main", parent: str = "") -> str:
        """Commit files by name: 'x!' is executable, 'x@' a link, 'x#' the commit of a submodule; directories are made."""
        return self.commit(self._tree({os.fsencode(name): data for name, data in files.items()}), branch, parent)

    def _tree(self, files: dict[bytes, bytes]) -> str:
        rows: dict[bytes, tuple[str, str, bytes]] = {}
        for name, data in files.items():
            first, slash, _ = name.partition(b"/")
            if slash:
                inside = {other[len(first) + 1 :]: held for other, held in files.items() if other.startswith(first + b"/")}
                rows[first + b"/"] = ("40000", self._tree(inside), first)
                continue
            mode = {b"!": "100755", b"@": "120000", b"#": "160000"}.get(name[-1:], "100644")
            plain = name if mode == "100644" else name[:-1]
            rows[plain] = (mode, data.decode() if mode == "160000" else self.blob(data), plain)
        return self.tree(*(rows[key] for key in sorted(rows)))


class Got:
    """What a source gave, with contents."""

    def __init__(self, source: GitSource, found: list[Found]) -> None:
        self.found = {item.path: item for item in found}
        self.order = [item.path for item in found]
        self.content = {item.path: read(item) for item in found if item.open}
        self.pin = source.pin()
        self.notes = source.notes()


def read(item: Found) -> bytes:
    assert item.open
    content = item.open()
    try:
        assert (content.size, content.mtime, content.mode) == (item.size, item.mtime, 0o755 if item.executable else 0o644)
        return os.pread(content.fd, content.size + 1, 0)
    finally:
        os.close(content.fd)


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def below(scratch: Path) -> list[int]:
    """The processes that work in `scratch`."""
    found = []
    for pid in processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").readlink().is_relative_to(scratch):
                found.append(pid)
    return found


def comm(pid: int) -> str:
    """The name of a process's program."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def rss(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def holding(folder: Path) -> Iterator[Path]:
    """The files that hold the token in one of its forms."""
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and any(form.encode() in path.read_bytes() for form in FORMS):
                yield path
