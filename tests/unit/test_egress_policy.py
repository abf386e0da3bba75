"""Which hosts and addresses a sandbox may reach, and how requests and TLS are read."""

from __future__ import annotations

import ipaddress
import json
import os
import ssl
from pathlib import Path

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.governance.egress_http import check_request, onward_request, read_target, returned_response
from activities.governance.egress_log import EgressLog, Entry
from activities.governance.egress_policy import EgressPolicy, Refused, address_fault, matches, normal_host, parse_networks
from activities.governance.egress_tls import read_client_hello
from activities.sandbox.egress_log import refusals

LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAME = st.builds(lambda labels, top: ".".join([*labels, top]), st.lists(LABEL, min_size=1, max_size=4), st.just("example"))


def hello(name: str | None, alpn: int = 0) -> bytes:
    """A real ClientHello, as OpenSSL writes it; more protocols make it longer."""
    context = ssl.create_default_context()
    context.check_hostname = False
    if alpn:
        context.set_alpn_protocols([f"protocol-{number}" for number in range(alpn)])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def request(head: bytes) -> h11.Request:
    """Parse a request's head as the proxy does."""
    conversation = h11.Connection(h11.SERVER)
    conversation.receive_data(head)
    event = conversation.next_event()
    assert isinstance(event, h11.Request)
    return event


def accept(head: bytes) -> h11.Request:
    """Return what the server would get for a request."""
    asked = request(head)
    target = read_target(asked)
    normal_host(target.host)
    check_request(asked, target)
    return onward_request(asked, target)


# --- Hosts ---------------------------------------------------------------------------------------------------------------


@given(NAME, st.randoms())
def test_a_name_matches_itself_however_it_is_written(name: str, random: object) -> None:
    """Case and a final dot do not count."""
    written = "".join(c.upper() if random.random() < 0.5 else c for c in name)  # type: ignore[attr-defined]
    assert matches(name, normal_host(written))
    assert matches(name, normal_host(written + "."))


@given(NAME, NAME)
def test_a_plain_pattern_matches_nothing_else(pattern: str, host: str) -> None:
    """Neither a name below, nor one above, nor one that merely ends like it."""
    assert matches(pattern, host) == (pattern == host)
    assert not matches(pattern, f"x.{pattern}")
    assert not matches(pattern, f"x{pattern}")


@given(NAME, LABEL)
def test_a_wildcard_matches_every_name_below_and_only_those(name: str, label: str) -> None:
    """`*.name` takes whole labels."""
    assert matches(f"*.{name}", f"{label}.{name}")
    assert matches(f"*.{name}", f"{label}.{label}.{name}")
    assert not matches(f"*.{name}", name)
    assert not matches(f"*.{name}", f"{label}{name}")
    assert not matches(f"*.{name}", f"{label}.{name}.evil.test")


@given(st.text(max_size=300))
def test_any_text_is_a_host_name_or_is_refused(text: str) -> None:
    """What comes out is lower-case ASCII that holds nothing which means something elsewhere."""
    try:
        host = normal_host(text)
    except Refused:
        return
    assert host.isascii()
    assert host == normal_host(host)
    assert not set(host) & set(" /\\:@[]%?#\r\n\t\0,*")


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "1.1.1.1.", "[::1]", "::1", "a.b.0x", "example.1"],
)
def test_addresses_are_refused_in_every_way_of_writing_them(text: str) -> None:
    """Only names can be allowed, so an address never is."""
    with pytest.raises(Refused, match="is an address"):
        normal_host(text)


@pytest.mark.parametrize(
    "text", ["", ".", "a..b", "a.example..", "-a.example", "a b.example", "\u212aexample.test", "a" * 64, "*.a.example"]
)
def test_what_is_no_host_name_is_refused(text: str) -> None:
    """Also the Kelvin sign, whose lower case is an ASCII k."""
    with pytest.raises(Refused):
        normal_host(text)


def test_a_refusal_tells_the_host_and_the_policy() -> None:
    """A model can see what it may reach instead."""
    policy = EgressPolicy(("pkg.example", "*.hosted.example"))
    with pytest.raises(Refused) as caught:
        policy.check_target("evil.example", 443, tls=True)
    assert str(caught.value) == (
        "host evil.example is not in this sandbox's network policy (allow: pkg.example, *.hosted.example)"
    )
    with pytest.raises(Refused, match=r"port 22 of pkg\.example .* \(TLS through CONNECT: 443\)"):
        policy.check_target("pkg.example", 22, tls=True)
    with pytest.raises(Refused, match="plain HTTP: 80"):
        policy.check_target("pkg.example", 443, tls=False)
    policy.check_target("files.hosted.example", 443, tls=True)


# --- Addresses -----------------------------------------------------------------------------------------------------------


@given(st.ip_addresses())
def test_what_is_not_global_is_always_refused(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """The check is never more generous than the standard library's."""
    if address_fault(str(address)) is None and not (address.version == 6 and address in ipaddress.IPv6Network("64:ff9b::/96")):
        assert address.is_global
        assert not address.is_multicast


@given(st.ip_addresses(v=4))
def test_an_address_within_another_counts_as_itself_or_is_refused(address: ipaddress.IPv4Address) -> None:
    """Mapped, compatible, 6to4 and Teredo forms are refused altogether, NAT64 as the address it stands for."""
    number = int(address)
    for form in (0xFFFF << 32 | number, number, 0x2002 << 112 | number << 80, 0x20010000 << 96 | (number ^ 0xFFFF_FFFF)):
        assert address_fault(str(ipaddress.IPv6Address(form))) is not None
    nat64 = str(ipaddress.IPv6Address((0x64FF9B << 96) | number))
    assert (address_fault(nat64) is None) == (address_fault(str(address)) is None)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "169.254.170.2", "172.31.0.1", "192.168.1.1"),
        *("192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1"),
        *("255.255.255.255", "168.63.129.16", "100.100.100.200"),
        *("::", "::1", "::ffff:8.8.8.8", "::8.8.8.8", "64:ff9b::7f00:1", "64:ff9b:1::1", "2001::1", "2001:db8::1"),
        *("2002:7f00:1::", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fe80::1%eth0"),
        *("fec0::1", "ff02::1", "4000::1", "not an address", ""),
    ],
)
def test_special_addresses_are_refused(address: str) -> None:
    """Private, loopback, link-local, metadata, shared, multicast, reserved, unspecified, documentation and the forms of these."""
    assert address_fault(address) is not None


@pytest.mark.parametrize("address", ["1.1.1.1", "151.101.0.223", "2606:4700:4700::1111", "2a04:4e42::223", "64:ff9b::808:808"])
def test_public_addresses_are_allowed(address: str) -> None:
    """The ordinary internet is reachable."""
    assert address_fault(address) is None


def test_an_operator_can_open_ranges_but_never_metadata() -> None:
    """Also a careless `0.0.0.0/0` opens no cloud's credentials."""
    opened = parse_networks("10.1.0.0/16, fd12::/16")
    assert address_fault("10.1.2.3", opened) is None
    assert address_fault("fd12::1", opened) is None
    assert address_fault("10.2.2.3", opened) is not None
    everything = parse_networks("0.0.0.0/0,::/0")
    within = ("64:ff9b::", "64:ff9b:1::", "64:ff9b:1:2:3:4:", "::", "::ffff:")
    forms = [f"{prefix}{inner}" for prefix in within for inner in ("169.254.169.254", "100.100.100.200", "168.63.129.16")]
    for address in (
        *("169.254.169.254", "168.63.129.16", "fd00:ec2::254", "fe80::1"),
        *("2002:a9fe:a9fe::1", "2001:0:a9fe:a9fe::", "2001::5601:5601", *forms),
    ):
        for ranges in (everything, parse_networks("::/0"), parse_networks("2002::/16,::/96,::ffff:0:0/96,64:ff9b:1::/48")):
            assert address_fault(address, ranges) is not None, address
    assert address_fault("2002:808:808::1", everything) is None


def test_one_bad_address_refuses_the_name() -> None:
    """A name that resolves to public and private addresses at once is not to be trusted."""
    with pytest.raises(Refused, match=r"allowed by name, but 169\.254\.169\.254"):
        EgressPolicy(("a.example",)).check_addresses("a.example", ["1.1.1.1", "169.254.169.254"])


# --- Requests ------------------------------------------------------------------------------------------------------------


def test_a_plain_request_is_written_anew() -> None:
    """The server gets the origin form and the checked host, and nothing that was meant for the proxy."""
    sent = accept(
        b"POST http://Pkg.example./simple/?q=1 HTTP/1.1\r\nHost: pkg.example\r\nProxy-Authorization: x\r\nProxy-Connection: x\r\n"
        b"Connection: X-Secret, Content-Length\r\nX-Secret: 1\r\nTE: trailers\r\nUpgrade: h2c\r\nContent-Length: 3\r\n"
        b"Accept: a\r\n\r\n"
    )
    assert (sent.method, sent.target) == (b"POST", b"/simple/?q=1")
    assert list(sent.headers) == [
        (b"host", b"pkg.example"),
        (b"content-length", b"3"),
        (b"accept", b"a"),
        (b"connection", b"close"),
    ]


def test_a_query_without_a_path_gets_one() -> None:
    """`http://host?x` asks for `/?x`."""
    assert accept(b"GET http://a.example?x HTTP/1.1\r\nHost: a.example\r\n\r\n").target == b"/?x"


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET https://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET ftp://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http:///a.example HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://user@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example@evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example\\@evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example%2eevil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example#@evil.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example:0/ HTTP/1.1\r\nHost: a.example:0\r\n\r\n",
        b"GET http://a.example:99999/ HTTP/1.1\r\nHost: a.example:99999\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example:8080\r\n\r\n",
        b"GET http://a.example:8080/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example, evil.example\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost:\r\n\r\n",
        b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST http://a.example/ HTTP/1.0\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"TRACE http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"CONNECT a.example HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"CONNECT http://a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"CONNECT a.example:443/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\nContent-Length: 5\r\n\r\n",
        b"CONNECT x@a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n",
    ],
)
def test_a_request_that_can_be_read_in_two_ways_is_refused(head: bytes) -> None:
    """What a server might take for another host, or for two requests, never leaves the proxy."""
    with pytest.raises(Refused):
        accept(head)


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://a.example/\r\nX: HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nHost: evil.example\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nX: a\rb\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nX : a\r\n\r\n",
        b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\nX: a\0\r\n\r\n",
        b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nContent-Length: +1\r\n\r\n",
        b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
        b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
        b"\x16\x03\x01\x00\x05hello\r\n\r\n",
    ],
)
def test_a_request_against_the_grammar_is_refused(head: bytes) -> None:
    """The parser takes nothing that others might read otherwise."""
    with pytest.raises(h11.RemoteProtocolError):
        accept(head)


def test_an_answer_is_framed_anew() -> None:
    """An answer with two lengths keeps the one that was used to read it, and loses what was meant for the proxy."""
    headers = [("Transfer-Encoding", "chunked"), ("Content-Length", "3"), ("Proxy-Authenticate", "x"), ("Set-Cookie", "a")]
    returned = returned_response(h11.Response(status_code=200, headers=headers))
    assert list(returned.headers) == [(b"set-cookie", b"a"), (b"connection", b"close")]


# --- TLS -----------------------------------------------------------------------------------------------------------------


def test_the_server_name_of_a_real_client_is_found() -> None:
    """OpenSSL's ClientHello names its host."""
    found = read_client_hello(hello("files.example"))
    assert found is not None
    assert (found.server_name, found.encrypted) == ("files.example", False)


def test_a_client_without_a_server_name_is_read() -> None:
    """Then there is nothing to compare."""
    found = read_client_hello(hello(None))
    assert found is not None
    assert found.server_name is None


@settings(deadline=None)
@given(st.integers(min_value=16, max_value=400), st.integers(min_value=0, max_value=20))
def test_a_client_hello_is_found_however_it_is_cut(size: int, alpn: int) -> None:
    """Cut into TLS records and read in small pieces, it is complete exactly at its end."""
    whole = hello("files.example", alpn)
    message = whole[5:]
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    cut = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in parts)
    for end in (*range(0, len(cut), 37), len(cut) - 1):
        assert read_client_hello(cut[:end]) is None
    found = read_client_hello(cut)
    assert found is not None
    assert found.server_name == "files.example"


@given(st.binary(max_size=600))
def test_any_bytes_are_read_without_another_fault(data: bytes) -> None:
    """Whatever a client sends: a ClientHello, more wanted, or a ValueError."""
    for prefix in (b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"):
        try:
            read_client_hello(prefix + data)
        except ValueError:
            continue


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"SSH-2.0-x\r\n", b"\x80\x2e\x01\x03\x01", b"\x16\x03\x01\x00\x00", b"\x17\x03\x03\x00\x01x"]
)
def test_what_is_no_client_hello_is_refused_at_once(data: bytes) -> None:
    """Other protocols are told by their first bytes."""
    with pytest.raises(ValueError, match="TLS"):
        read_client_hello(data)


def test_an_encrypted_client_hello_is_noticed() -> None:
    """With ECH the real host is hidden, so it is told (draft-ietf-tls-esni, extension 0xfe0d)."""
    whole = bytearray(hello("files.example"))
    extra = b"\xfe\x0d\x00\x01\x00"
    at = 5 + 4 + 34
    at += 1 + whole[at]
    at += 2 + int.from_bytes(whole[at : at + 2])
    at += 1 + whole[at]
    for place, size in ((3, 2), (6, 3), (at, 2)):
        whole[place : place + size] = (int.from_bytes(whole[place : place + size]) + len(extra)).to_bytes(size)
    found = read_client_hello(bytes(whole) + extra)
    assert found is not None
    assert found.encrypted


# --- The record ----------------------------------------------------------------------------------------------------------


def test_refusals_in_a_loop_leave_room_for_what_is_allowed(tmp_path: Path) -> None:
    """The record is bounded, no connection goes without its line, and when it is full none is made."""
    path = tmp_path / "egress.jsonl"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    log = EgressLog(fd, limit=20_000, for_refused=8_000)
    for _ in range(500):
        log.refuse(Entry(host="evil.example"), "no")
    refused = path.stat().st_size
    assert refused < 9_000
    made = []
    while log.allow(entry := Entry(method="CONNECT", host="a.example", port=443)):
        made.append(entry)
    for entry in made:
        log.close(entry)
    os.close(fd)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.stat().st_size <= 20_000
    assert len(made) > 3
    assert [line["connection"] for line in lines if line["verdict"] == "closed"] == [entry.connection for entry in made]
    assert sum(line.get("reason", "").startswith("many connections were refused") for line in lines) == 1


def test_refusals_are_counted_also_of_a_record_that_was_cut_off() -> None:
    """A process that was killed while writing leaves half a line."""
    line = b'{"verdict": "refused", "host": "evil.example", "port": 443, "reason": "no"}\n'
    assert refusals(line + b'{"verdict": "allowed"}\n' + line + line[:20]) == {("evil.example", 443, "no"): 2}
