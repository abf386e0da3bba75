"""Real servers with a real certificate, for tests of a sandbox's network."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from activities.governance.egress_policy import parse_networks

LOOPBACK = parse_networks("127.0.0.0/8")
NAMES = ("allowed.example", "other.example")


@dataclass
class Authority:
    """A certificate authority of the test's own, and a certificate of it for both names."""

    directory: Path

    @property
    def ca(self) -> Path:
        """What clients trust."""
        return self.directory / "ca.pem"

    def server(self) -> ssl.SSLContext:
        """What a server shows."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / "server.pem", self.directory / "server.key")
        return context

    def client(self) -> ssl.SSLContext:
        """How a client checks."""
        return ssl.create_default_context(cafile=str(self.ca))


def make_authority(directory: Path) -> Authority:
    """Make it with the `openssl` command."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    sign = ("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
    names = ",".join(f"DNS:{name}" for name in NAMES)
    (directory / "names.cnf").write_text(f"subjectAltName={names}\n")
    for command in (
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test CA"],
        ["req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server"],
        [*sign, "-out", "server.pem", "-days", "2", "-extfile", "names.cnf"],
    ):
        subprocess.run(["openssl", *command], cwd=directory, check=True, capture_output=True)
    return Authority(directory)


@dataclass
class Site:
    """A web server on this machine: its files, and what it was asked for."""

    port: int
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)


@contextlib.contextmanager
def serve(tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Run a web server in a thread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            site.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            found = site.files.get(self.path.partition("?")[0])
            data = found if found is not None else b"nothing here\n"
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = answer  # noqa: N815 - the names that the library calls

        def log_message(self, format: str, *args: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    site = Site(server.server_address[1], {"/hello": b"hello from outside\n"})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.asynccontextmanager
async def raw_server(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run a server that gives one answer to every connection, and keeps the bytes it got from each."""
    got: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(b"")
        mine = len(got) - 1
        writer.write(answer)
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                got[mine] += data
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], got
    finally:
        server.close()


async def until(condition: object, within: float = 5.0) -> None:
    """Wait until a condition holds."""
    assert callable(condition)
    for _ in range(int(within / 0.05)):
        if condition():
            return
        await asyncio.sleep(0.05)
    pytest.fail("what was waited for did not come")
