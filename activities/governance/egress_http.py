"""What a client asks of the proxy, read strictly and written anew. Pure; HTTP/1.1 itself is h11's.

Nothing that a client sent reaches a server as it came: h11 parses it and writes it again, so there are no two readings of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import h11

from activities.governance.egress_policy import SHOWN_HOST, Refused, normal_host

METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"})
"""Of plain HTTP. CONNECT is apart; TRACE, which sends a request back, is not needed."""

_AUTHORITY = re.compile(rb"(?P<host>\[[^\]@/]*\]|[^\[\]@/?#:\\%]+)(?::(?P<port>[0-9]{1,5}))?")
_ABSOLUTE = re.compile(rb"(?i:http)://(?P<authority>[^/?#]+)(?P<rest>[/?][^#]*)?")
_RECORDABLE = re.compile(rb"(?:[^/?#\\]*@)?(?P<host>[A-Za-z0-9._:\[\]-]*)")
"""An authority of which the host may be recorded: nothing in it is a path or a query."""
_QUOTED = re.compile(r"[:\s]*(?:bytearray\(|b['\"])")
"""Where h11 begins to quote what it got."""
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"http2-settings"}
)
"""RFC 9110, 7.6.1. `Transfer-Encoding` is set anew where there is one, `Expect` is answered by the proxy."""
_UNTOUCHABLE = frozenset({b"host", b"content-length", b"content-type"})
"""What `Connection:` must not take away from a request (RFC 9110, 7.6.1), since its meaning would change."""


@dataclass(frozen=True)
class Target:
    """Where a request goes. `host` is as it was written; `path` is the origin form, empty for CONNECT."""

    method: str
    host: str
    port: int
    path: bytes


def read_target(request: h11.Request) -> Target:
    """Return where a request goes. Raises Refused for anything but `CONNECT host:port` and `METHOD http://host/path`."""
    if request.method == b"CONNECT":
        host, port = _authority(request.target)
        if port is None:
            raise Refused("CONNECT needs a host and a port", 400)
        return Target("CONNECT", host, port, b"")
    if request.method not in METHODS:
        known = ", ".join(sorted(method.decode() for method in METHODS))
        raise Refused(f"the proxy of this sandbox does not know this method (known: CONNECT, {known})", 405)
    found = _ABSOLUTE.fullmatch(request.target)
    if found is None:
        raise Refused("this is a proxy: it takes CONNECT host:port, or a request for http://host/path", 400)
    host, port = _authority(found["authority"])
    rest = found["rest"] or b"/"
    return Target(request.method.decode(), host, 80 if port is None else port, rest if rest.startswith(b"/") else b"/" + rest)


def check_request(request: h11.Request, target: Target) -> None:
    """Check that a request says one thing only. Raises Refused."""
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        raise Refused("a request must not have two lengths (Transfer-Encoding beside Content-Length, or in HTTP/1.0)", 400)
    if target.method == "CONNECT" and (b"transfer-encoding" in names or b"content-length" in names):
        raise Refused("CONNECT has no body", 400)
    for name, value in request.headers:
        if name == b"host":
            host, port = _authority(value)
            # Some programs leave the port out of CONNECT's Host header; elsewhere none means 80.
            expected = target.port if target.method == "CONNECT" else 80
            same = normal_host(host) == normal_host(target.host) and (expected if port is None else port) == target.port
            if not same:
                raise Refused(f"the Host header names {_shown(value[:SHOWN_HOST])}, but the request is for {target.host}", 400)


def onward_request(request: h11.Request, target: Target) -> h11.Request:
    """Return a plain request as the server gets it: origin form, the host that was checked, nothing meant for the proxy."""
    host = normal_host(target.host)
    headers = [(b"Host", host.encode() if target.port == 80 else f"{host}:{target.port}".encode())]
    headers += [(name, value) for name, value in _end_to_end(request.headers) if name != b"host"]
    if any(name == b"transfer-encoding" for name, _ in request.headers):
        headers.append((b"Transfer-Encoding", b"chunked"))
    headers.append((b"Connection", b"close"))
    return h11.Request(method=request.method, target=target.path, headers=headers)


def returned_response(response: h11.Response) -> h11.Response:
    """Return a server's answer as the client gets it. Its body is framed anew by h11."""
    headers = _end_to_end(response.headers)
    if any(name == b"transfer-encoding" for name, _ in response.headers):
        headers = [(name, value) for name, value in headers if name != b"content-length"]
    headers.append((b"Connection", b"close"))
    return h11.Response(status_code=response.status_code, headers=headers, reason=response.reason)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    headers = list(headers)
    listed = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    dropped = _HOP_BY_HOP | (listed - _UNTOUCHABLE)
    return [(name, value) for name, value in headers if name not in dropped and not name.startswith(b"proxy-")]


def _authority(text: bytes) -> tuple[str, int | None]:
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise Refused(_fault_of(text), 400)
    port = int(found["port"]) if found["port"] is not None else None
    if port is not None and not 0 < port < 65536:
        raise Refused(f"{port} is no port", 400)
    return found["host"].decode("latin-1"), port


def _fault_of(text: bytes) -> str:
    """Say what is wrong with an authority. The words are recorded, so no password, path or query of it may be in them."""
    found = _RECORDABLE.fullmatch(text)
    if found is None:
        return "what stands in the place of a host does not name one, or a host and a port"
    if b"@" in text:
        return f"there is a user name before the host {_shown(found['host'][:SHOWN_HOST])}; send it in a header instead"
    return f"{_shown(found['host'][:SHOWN_HOST])} does not name a host, or a host and a port"


def without_data(error: h11.RemoteProtocolError) -> str:
    """Return what h11 says of a request, without the bytes of it that it quotes."""
    return _QUOTED.split(str(error), maxsplit=1)[0]


def _shown(text: bytes) -> str:
    return ascii(text.decode("latin-1"))
