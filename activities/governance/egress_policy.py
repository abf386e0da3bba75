"""Which hosts and addresses a sandbox may reach. Pure: names and addresses in, a verdict in words out."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

TLS_PORTS = frozenset({443})
HTTP_PORTS = frozenset({80})
SHOWN_PATTERNS = 20
SHOWN_HOST = 253
"""The longest host name there is (RFC 1035, 2.3.4)."""

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label like this makes the whole name an IPv4 address for many programs (https://url.spec.whatwg.org/#ends-in-a-number-checker)."""


class Refused(Exception):
    """A connection is not made; the message says to the one who asked why, and `status` is the HTTP status that fits."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


def _networks(*texts: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


METADATA = _networks(
    "169.254.0.0/16",  # link-local: AWS, Azure, Google, OpenStack at .169.254; AWS ECS at .170.2
    "fe80::/10",  # link-local
    "fd00:ec2::/32",  # AWS
    "fd20:ce::/32",  # Google
    "100.100.100.200/32",  # Alibaba
    "168.63.129.16/32",  # Azure's host, a public address by its form
    "192.0.0.192/32",  # Oracle
)
"""Where clouds keep credentials of their machines. Refused whatever an operator allows."""

SPECIAL = _networks(
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24"),
    *("192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),  # Teredo and others, documentation, 6to4, documentation
)
"""Special-purpose ranges (IANA registries), named here since `ipaddress.is_global` differs between versions of Python."""

GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that IANA gives out. Outside are ::1, IPv4-mapped and -compatible, unique local, site-local, multicast and the rest."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""RFC 6052: an IPv4 address in the last 32 bits, which is what counts."""
_IN_LAST_BITS = (ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
"""IPv4-compatible addresses, and NAT64 within an operator's own network (RFC 8215)."""


def parse_networks(text: str) -> tuple[Network, ...]:
    """Read a comma list of CIDR ranges. Raises ValueError naming the bad one."""
    return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())


def address_fault(text: str, private: Iterable[Network] = ()) -> str | None:
    """Say why no connection may be made to an address, or return None when one may. `private` is what an operator opened."""
    try:
        address: Address = ipaddress.ip_address(text)
    except ValueError:
        return f"{text!r} is no address"
    if address.version == 6 and address in NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        fault = address_fault(str(inner), private)
        return f"{address} stands for {inner}: {fault}" if fault else None
    for one in (address, *_embedded(address)):
        if any(one in network for network in METADATA):
            return f"{address} is a link-local or metadata address" + ("" if one == address else f" ({one})")
    if any(address in network for network in private):
        return None
    if address.version == 6 and address not in GLOBAL_UNICAST:
        return f"{address} is not a public address"
    if any(address in network for network in SPECIAL) or not address.is_global:
        return f"{address} is not a public address"
    return None


def _embedded(address: Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that an IPv6 address may stand for."""
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _IN_LAST_BITS):
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return [one for one in found if one is not None]


def normal_host(text: str) -> str:
    """Return a host name in lower case without its final dot. Raises Refused for an address and for what is no host name.

    International names come in their ASCII form (`xn--...`), as every program sends them.
    """
    # Before lower(): the Kelvin sign, for one, becomes an ASCII k.
    host = text.lower().removesuffix(".") if text.isascii() else ""
    if "[" in host or ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]):
        raise Refused(f"{text[:SHOWN_HOST]} is an address; this sandbox reaches hosts by name only")
    if not host or len(host) > SHOWN_HOST or not all(_LABEL.fullmatch(label) for label in host.split(".")):
        raise Refused(f"{text[:SHOWN_HOST]!a} is not a host name", 400)
    return host


def matches(pattern: str, host: str) -> bool:
    """Tell whether a host in its normal form is the pattern, or lies below the name after a pattern's `*.`."""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


@dataclass(frozen=True)
class EgressPolicy:
    """What one sandbox may reach. `allow` holds host names in lower case, `*.` before one for every name below it."""

    allow: tuple[str, ...]
    private: tuple[Network, ...] = ()
    tls_ports: frozenset[int] = TLS_PORTS
    http_ports: frozenset[int] = HTTP_PORTS

    def check_target(self, host: str, port: int, *, tls: bool) -> None:
        """Check a host in its normal form and a port. Raises Refused in words that let a model go on sensibly."""
        if not any(matches(pattern, host) for pattern in self.allow):
            shown = ", ".join(self.allow[:SHOWN_PATTERNS])
            more = f" and {len(self.allow) - SHOWN_PATTERNS} more" if len(self.allow) > SHOWN_PATTERNS else ""
            raise Refused(f"host {host} is not in this sandbox's network policy (allow: {shown}{more})")
        ports = self.tls_ports if tls else self.http_ports
        if port not in ports:
            kind = "TLS through CONNECT" if tls else "plain HTTP"
            raise Refused(f"port {port} of {host} is not in this sandbox's network policy ({kind}: {_listed(ports)})")

    def check_addresses(self, host: str, addresses: Iterable[str]) -> None:
        """Check everything that a name resolved to. One bad address refuses all: a name that mixes them is not to be trusted."""
        for address in addresses:
            fault = address_fault(address, self.private)
            if fault is not None:
                raise Refused(f"host {host} is allowed by name, but {fault}")

    def is_opened(self, address: str) -> bool:
        """Tell whether an operator opened a range that holds this address, already checked."""
        return any(ipaddress.ip_address(address) in network for network in self.private)


def _listed(ports: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(ports)))
