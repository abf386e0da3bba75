"""The filtering proxy by itself: what it lets through, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from activities.governance.egress import Limits, Proxy, is_own_address
from activities.governance.egress_log import EgressLog
from activities.governance.egress_policy import EgressPolicy
from tests.sandbox.egress_support import LOOPBACK, Authority, Site, raw_server, until

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a connection, whatever became of it."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Running:
    """A proxy that listens on this machine. `names` is what its resolver knows: for each name what it says, time after time."""

    def __init__(self, port: int, log: Path, names: dict[str, list[Sequence[str]]]) -> None:
        self.port = port
        self.names = names
        self._log = log

    def lines(self, *verdicts: str) -> list[dict[str, Any]]:
        """The lines of the record with one of these verdicts, or all."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [line for line in lines if not verdicts or line["verdict"] in verdicts]

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the proxy."""
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, data: bytes) -> bytes:
        """Send bytes and return all that comes back."""
        reader, writer = await self.open()
        writer.write(data)
        received = b""
        try:
            async with asyncio.timeout(10):
                while part := await reader.read(65536):
                    received += part
        except ConnectionResetError:
            pass  # what had come before it counts
        finally:
            await hang_up(writer)
        return received

    async def tls(self, authority: Authority, connect: str, port: int, name: str) -> bytes:
        """CONNECT to one host, begin TLS for another (or the same), and ask for /hello."""
        reader, writer = await self.open()
        writer.write(f"CONNECT {connect}:{port} HTTP/1.1\r\nHost: {connect}:{port}\r\n\r\n".encode())
        try:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await writer.start_tls(authority.client(), server_hostname=name)
            writer.write(f"GET /hello HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
            return await reader.read()
        finally:
            await hang_up(writer)


@contextlib.asynccontextmanager
async def running(
    directory: Path, ports: Sequence[int], allow: Sequence[str] = ("allowed.example", "*.below.example"), **limits: float
) -> AsyncIterator[Running]:
    """Run a proxy in this process, allowed to use `ports` of this machine."""
    log = os.open(directory / "egress.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    names: dict[str, list[Sequence[str]]] = {"allowed.example": [["127.0.0.1"]], "other.example": [["127.0.0.1"]]}

    async def resolver(host: str, port: int) -> Sequence[str]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return names[host].pop(0) if len(names[host]) > 1 else names[host][0]

    policy = EgressPolicy(tuple(allow), LOOPBACK, frozenset(ports), frozenset(ports))
    proxy = Proxy(policy, EgressLog(log), resolver=resolver, limits=Limits(**limits))  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    await proxy.start(listener)
    try:
        yield Running(listener.getsockname()[1], directory / "egress.jsonl", names)
    finally:
        await proxy.stop()
        os.close(log)


def get(host: str, port: int, path: str = "/hello", more: str = "") -> bytes:
    """A plain request for the proxy."""
    return f"GET http://{host}:{port}{path} HTTP/1.1\r\nHost: {host}:{port}\r\n{more}\r\n".encode()


async def test_tls_to_an_allowed_host_goes_through(tmp_path: Path, authority: Authority, secure: Site) -> None:
    """End to end, with the certificate checked, and two lines in the record."""
    async with running(tmp_path, [secure.port]) as proxy:
        assert (await proxy.tls(authority, "allowed.example", secure.port, "allowed.example")).endswith(b"hello from outside\n")
        await until(lambda: proxy.lines("closed"))
        allowed, closed = proxy.lines()
    assert (allowed["verdict"], allowed["method"], allowed["host"], allowed["port"], allowed["address"]) == (
        *("allowed", "CONNECT", "allowed.example", secure.port),
        "127.0.0.1",
    )
    assert closed["connection"] == allowed["connection"]
    assert closed["up"] > 300
    assert closed["down"] > 500
    assert closed["seconds"] >= 0


async def test_plain_http_to_an_allowed_host_goes_through(tmp_path: Path, plain: Site) -> None:
    """With the path in origin form; the record has neither path nor query."""
    async with running(tmp_path, [plain.port]) as proxy:
        answer = await proxy.ask(get("ALLOWED.example.", plain.port, "/hello?token=abc", "Proxy-Authorization: Basic x\r\n"))
        await until(lambda: proxy.lines("closed"))
        text = json.dumps(proxy.lines())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"hello from outside\n")
    ((method, path, headers, _),) = plain.asked
    assert (method, path, headers["host"]) == ("GET", "/hello?token=abc", f"allowed.example:{plain.port}")
    assert "proxy-authorization" not in headers
    assert "token" not in text
    assert "hello" not in text


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nAuthorization : Bearer CANARY\r\n\r\n", "illegal header line"),
        (b"GET http://a.example/?token=CANARY\xe9 HTTP/1.1\r\nHost: a.example\r\n\r\n", "illegal request line"),
        (b"GET http://user:CANARY@a.example/x HTTP/1.1\r\nHost: a.example\r\n\r\n", "a user name before the host 'a.example'"),
        (b"GET http://a.example/ HTTP/1.1\r\nHost: user:CANARY@a.example\r\n\r\n", "a user name before the host 'a.example'"),
        (b"GET http://a.example/ HTTP/1.1\r\nHost: a.example/?x=me@CANARY\r\n\r\n", "in the place of a host"),
        (b"GET http://a.example/ HTTP/1.1\r\nHost: user:CAN/CANARY@a.example\r\n\r\n", "in the place of a host"),
        (b"CONNECT a.example:443/CANARY HTTP/1.1\r\nHost: a.example\r\n\r\n", "in the place of a host"),
        (
            b"CANARY http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "does not know this method (known: CONNECT, DELETE, GET",
        ),
        (b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nContent-Length: CANARY\r\n\r\n", "bad Content-Length"),
    ],
)
async def test_the_record_quotes_nothing_of_a_request_but_its_host(tmp_path: Path, head: bytes, told: str) -> None:
    """Headers, queries, names and passwords are not for whoever reads the record, also when a request is refused for them."""
    async with running(tmp_path, [80]) as proxy:
        assert (await proxy.ask(head))[9:10] == b"4"
        (line,) = proxy.lines()
    assert "CAN" not in json.dumps(line)
    assert told in line["reason"]


async def test_another_host_is_refused_in_words(tmp_path: Path, plain: Site) -> None:
    """Both ways of asking get 403, a text that names host and policy, and a line; the resolver is not asked."""
    async with running(tmp_path, [plain.port]) as proxy:
        for data in (get("evil.example", plain.port), b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n"):
            answer = await proxy.ask(data)
            assert answer.startswith(b"HTTP/1.1 403 host evil.example is not in this sandbox's network policy")
            assert answer.endswith(b"(allow: allowed.example, *.below.example)\n")
        assert [line["host"] for line in proxy.lines("refused")] == ["evil.example"] * 2
    assert plain.asked == []


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "169.254.169.254", "2130706433", "0x7f.1"])
async def test_an_address_is_refused(tmp_path: Path, plain: Site, address: str) -> None:
    """Even one that an operator has opened: hosts are reached by name."""
    async with running(tmp_path, [plain.port]) as proxy:
        for data in (get(address, plain.port), f"CONNECT {address}:{plain.port} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()):
            assert b"403 " in (await proxy.ask(data)).partition(b"\r\n")[0]
        assert len(proxy.lines("refused")) == 2


async def test_metadata_and_private_addresses_are_refused_by_what_a_name_resolves_to(tmp_path: Path, plain: Site) -> None:
    """Also when only one of several addresses is bad."""
    async with running(tmp_path, [plain.port], ["*.below.example"]) as proxy:
        for number, addresses in enumerate((["169.254.169.254"], ["10.0.0.1"], ["127.0.0.1", "fd00::1"], ["::ffff:127.0.0.1"])):
            proxy.names[f"n{number}.below.example"] = [addresses]
            answer = await proxy.ask(get(f"n{number}.below.example", plain.port))
            assert b"is allowed by name, but" in answer
        assert len(proxy.lines("refused")) == 4
    assert plain.asked == []


async def test_a_name_that_is_rebound_is_refused_or_used_as_checked(tmp_path: Path, plain: Site) -> None:
    """A name is resolved once a connection: what was checked is what is connected to, and the next answer is checked anew."""
    async with running(tmp_path, [plain.port]) as proxy:
        proxy.names["allowed.example"] = [["127.0.0.1"], ["169.254.169.254"], ["127.0.0.1"]]
        answers = [await proxy.ask(get("allowed.example", plain.port)) for _ in range(3)]
        assert [answer.split()[1] for answer in answers] == [b"200", b"403", b"200"]


async def test_the_addresses_of_this_machine_are_known() -> None:
    """Also a public one is found by asking the kernel, without sending anything."""
    assert is_own_address("127.0.0.1", 80)
    assert not is_own_address("192.0.2.1", 80)


async def test_another_port_is_refused(tmp_path: Path, plain: Site) -> None:
    """Only those of the policy."""
    async with running(tmp_path, [plain.port]) as proxy:
        assert b"403 port 22 of allowed.example" in await proxy.ask(
            b"CONNECT allowed.example:22 HTTP/1.1\r\n\r\n".replace(b"1.1", b"1.0")
        )


async def test_tls_for_another_host_is_refused(tmp_path: Path, authority: Authority, secure: Site) -> None:
    """A CONNECT to one host whose TLS names another never reaches a server."""
    async with running(tmp_path, [secure.port]) as proxy:
        with pytest.raises(ssl.SSLError, match=r"(?i)access.denied"):
            await proxy.tls(authority, "allowed.example", secure.port, "other.example")
        (line,) = proxy.lines()
    assert line["reason"] == "CONNECT was to allowed.example, but its TLS is for other.example"
    assert secure.asked == []


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"\x16\x03\x01\x00\x00"])
async def test_what_is_not_tls_is_refused_after_connect(tmp_path: Path, data: bytes) -> None:
    """CONNECT is no way to speak something else to an allowed host."""
    async with raw_server(ANSWER) as (port, got), running(tmp_path, [port]) as proxy:
        answer = await proxy.ask(f"CONNECT allowed.example:{port} HTTP/1.1\r\nHost: allowed.example\r\n\r\n".encode() + data)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert ANSWER not in answer
        assert "TLS only" in proxy.lines("refused")[0]["reason"]
        assert b"".join(got) == b""


async def test_connect_without_anything_after_it_is_refused_in_time(tmp_path: Path, plain: Site) -> None:
    """A tunnel in which nobody speaks does not stay."""
    async with running(tmp_path, [plain.port], head=0.3) as proxy:
        await proxy.ask(f"CONNECT allowed.example:{plain.port} HTTP/1.1\r\nHost: allowed.example\r\n\r\n".encode())
        assert proxy.lines("refused")[0]["reason"] == "no TLS began after CONNECT"


@pytest.mark.parametrize(
    "tail",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /hidden HTTP/1.1\r\n\r\n",
        b"Content-Length: 3\r\nContent-Length: 30\r\n\r\nabc",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"X: a\rHost: evil.example\r\n\r\n",
        b"Host: evil.example\r\n\r\n",
        b" folded: before any\r\n \x00\r\n\r\n",
    ],
)
async def test_a_request_that_others_might_read_otherwise_goes_nowhere(tmp_path: Path, tail: bytes) -> None:
    """Smuggling by two lengths, odd codings, line ends and repeated hosts ends at the proxy."""
    async with raw_server(ANSWER) as (port, got), running(tmp_path, [port]) as proxy:
        head = f"POST http://allowed.example:{port}/ HTTP/1.1\r\nHost: allowed.example:{port}\r\n".encode()
        answer = await proxy.ask(head + tail)
        assert answer[9:10] in (b"4", b"5")
        assert len(proxy.lines("refused")) == 1
        assert got == []


async def test_a_broken_chunk_reaches_no_server_as_a_whole_request(tmp_path: Path) -> None:
    """The body is decoded and coded anew, so its end is never invented."""
    async with raw_server(b"") as (port, got), running(tmp_path, [port]) as proxy:
        head = (
            f"POST http://allowed.example:{port}/ HTTP/1.1\r\nHost: allowed.example:{port}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        answer = await proxy.ask(head.encode() + b"3\r\nabc\r\n-1\r\nGET /hidden HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        await until(lambda: proxy.lines("closed"))
        assert b"hidden" not in b"".join(got)
        assert b"\r\n0\r\n" not in b"".join(got)


async def test_a_second_request_on_a_connection_is_not_carried_out(tmp_path: Path, plain: Site) -> None:
    """One connection, one request: the next one is checked on a connection of its own."""
    async with running(tmp_path, [plain.port]) as proxy:
        answer = await proxy.ask(get("allowed.example", plain.port) + get("evil.example", plain.port))
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answer.lower()
    assert len(plain.asked) == 1


async def test_an_absolute_target_for_another_host_than_the_host_header_is_refused(tmp_path: Path, plain: Site) -> None:
    """Whichever of the two is allowed."""
    async with running(tmp_path, [plain.port]) as proxy:
        for target, host in (("allowed.example", "evil.example"), ("evil.example", "allowed.example")):
            data = f"GET http://{target}:{plain.port}/hello HTTP/1.1\r\nHost: {host}:{plain.port}\r\n\r\n".encode()
            assert (await proxy.ask(data))[9:10] == b"4"
    assert plain.asked == []


async def test_a_head_without_end_is_refused(tmp_path: Path, plain: Site) -> None:
    """At 64 KiB, and after the time for a head."""
    async with running(tmp_path, [plain.port], head=1.0) as proxy:
        answer = await proxy.ask(b"GET http://allowed.example/ HTTP/1.1\r\nX: " + b"a" * 200_000)
        assert answer[9:12] in (b"431", b"400", b"")
        assert await proxy.ask(b"GET http://allowed.example/ HT") == b""


async def test_too_many_connections_are_refused(tmp_path: Path, plain: Site) -> None:
    """The bound is told, and holds only as long as the others are open."""
    async with running(tmp_path, [plain.port], connections=3, head=20) as proxy:
        idle = [await proxy.open() for _ in range(3)]
        await asyncio.sleep(0.2)
        assert (await proxy.ask(get("allowed.example", plain.port))).startswith(b"HTTP/1.1 503 there are 3 connections already")
        for _, writer in idle:
            await hang_up(writer)
        await asyncio.sleep(0.3)
        assert (await proxy.ask(get("allowed.example", plain.port))).startswith(b"HTTP/1.1 200 ")


async def test_bodies_of_any_size_and_framing_go_through(tmp_path: Path, plain: Site) -> None:
    """Up with a length or in chunks after 100-continue, down with a length; HEAD has none."""
    big = os.urandom(3_000_000)
    plain.files["/big"] = big
    async with running(tmp_path, [plain.port]) as proxy:
        assert (await proxy.ask(get("allowed.example", plain.port, "/big"))).endswith(b"\r\n\r\n" + big)
        head = f"POST http://allowed.example:{plain.port}/hello HTTP/1.1\r\nHost: allowed.example:{plain.port}\r\n".encode()
        await proxy.ask(head + b"Content-Length: %d\r\n\r\n" % len(big) + big)
        answer = await proxy.ask(
            head + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        assert b"200" in answer
        answer = await proxy.ask(get("allowed.example", plain.port).replace(b"GET", b"HEAD"))
        assert answer.endswith(b"\r\n\r\n")
        await until(lambda: len(proxy.lines("closed")) == 4)
        assert proxy.lines("closed")[0]["down"] > len(big)
    assert [body for method, _, _, body in plain.asked if method == "POST"] == [big, b"abcde"]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nContent-Length: 2\r\n\r\nok",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\rb\r\n\r\n",
    ],
)
async def test_a_servers_improper_answer_is_not_passed_on(tmp_path: Path, answer: bytes) -> None:
    """The client gets 502 instead."""
    async with raw_server(answer) as (port, _), running(tmp_path, [port]) as proxy:
        assert (await proxy.ask(get("allowed.example", port))).startswith(b"HTTP/1.1 502 ")


async def test_a_host_that_cannot_be_reached_is_told_apart_from_one_that_is_refused(tmp_path: Path) -> None:
    """A name that does not resolve, and a port at which nobody listens, are 502 and `failed`."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with running(tmp_path, [port]) as proxy:
        assert (await proxy.ask(get("allowed.example", port))).startswith(
            b"HTTP/1.1 502 host allowed.example could not be reached"
        )
        assert b"502 host x.below.example cannot be resolved" in await proxy.ask(get("x.below.example", port))
        assert len(proxy.lines("failed")) == 2


async def test_an_idle_connection_ends(tmp_path: Path) -> None:
    """A server that says nothing does not hold a connection for ever."""
    async with raw_server(b"") as (port, _), running(tmp_path, [port], idle=0.5) as proxy:
        assert (await proxy.ask(get("allowed.example", port))).startswith(b"HTTP/1.1 502 ")
        await until(lambda: proxy.lines("closed"))


async def test_stopping_writes_the_lines_of_what_goes_on(tmp_path: Path) -> None:
    """No allowed connection is without its end in the record."""
    async with raw_server(b"") as (port, _):
        async with running(tmp_path, [port]) as proxy:
            _, writer = await proxy.open()
            writer.write(get("allowed.example", port))
            await until(lambda: proxy.lines("allowed"))
            assert not proxy.lines("closed")
        assert len(proxy.lines("closed")) == 1
        await hang_up(writer)
