"""Pictures from other machines, for hosts that were named: one GET, bounded in time and size.

A name is resolved once; its addresses are checked, and the connection goes to the address that was
checked. Private ranges are refused unless an address or network that holds them was named.
Redirects are followed three times and checked like the first URL.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from edgevlm.errors import BadImage, BadParameter

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
_READ = 64 * 1024
# IPv6 ranges that carry an IPv4 address to somebody who unpacks it.
_TRANSLATED = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


@dataclass(frozen=True)
class AllowedHosts:
    """`names`: exact, or "*.example.org" for all below it, "host:port" for that port alone."""

    names: tuple[str, ...]
    networks: tuple[Network, ...]

    @classmethod
    def parse(cls, entries: Sequence[str]) -> "AllowedHosts":
        """What was named: names, addresses, networks."""
        names, networks = [], []
        for entry in entries:
            try:
                networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                names.append(entry.lower().rstrip("."))
        return cls(tuple(names), tuple(networks))

    def allows(self, host: str, port: int, scheme: str) -> bool:
        """Whether a URL may name this host and port."""
        default = port == PORTS[scheme]
        literal = _literal(host)
        if literal is not None:
            return any(literal in network for network in self.networks)
        for name in self.names:
            bare, colon, wanted = name.partition(":")
            if (wanted == str(port)) if colon else default:
                if host == bare or bare.startswith("*.") and host.endswith(bare[1:]):
                    return True
        return False

    def reachable(self, address: Address) -> bool:
        """Whether a connection may go there."""
        if any(address in network for network in self.networks):
            return True
        return is_public(address)


def is_public(address: Address) -> bool:
    """A global unicast address that hides no other one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped
        if inner is not None:
            return is_public(inner)
        if address.sixtofour or address.teredo or any(address in n for n in _TRANSLATED):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class Fetcher:
    """GETs pictures."""

    def __init__(self, hosts: Sequence[str], max_bytes: int, timeout: float) -> None:
        self._hosts = AllowedHosts.parse(hosts)
        self._on = bool(hosts)
        self._max_bytes, self._timeout = max_bytes, timeout
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, where: str) -> bytes:
        """The picture's bytes. Raises BadParameter or BadImage; `where` names the field."""
        if not self._on:
            raise BadParameter(
                f"{where} is a remote URL; fetching is off: send a data URL, or start the service "
                "with --allow-image-hosts HOST"
            )
        try:
            return await asyncio.wait_for(self._follow(url, where), self._timeout)
        except asyncio.TimeoutError:
            raise BadImage(
                f"{where} was not fetched within {self._timeout:g} s; send it as a data URL"
            ) from None
        except (OSError, EOFError, h11.ProtocolError) as error:
            reason = str(error) or type(error).__name__
            raise BadImage(f"{where} cannot be fetched: {reason[:200]}") from None

    async def _follow(self, url: str, where: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            parts, host, port = self._checked(url, where)
            address = await self._resolve(host, port, where)
            found = await self._get(parts, host, port, address, where)
            if isinstance(found, bytes):
                return found
            following = urljoin(url, found)
            if parts.scheme == "https" and urlsplit(following).scheme != "https":
                raise BadParameter(f"{where} redirects from https to something else")
            url = following
        raise BadParameter(f"{where} redirects more than {MAX_REDIRECTS} times")

    def _checked(self, url: str, where: str) -> tuple[SplitResult, str, int]:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            # What cannot stand in a request line or in a header must not get there.
            plain = url.isascii() and url.isprintable() and " " not in url
        except ValueError:
            host, port, plain = None, None, False
        if not plain or not host or parts.scheme not in PORTS or parts.username is not None:
            raise BadParameter(f"{where} is no plain http: or https: URL")
        port = port or PORTS[parts.scheme]
        host = host.rstrip(".")
        if not self._hosts.allows(host, port, parts.scheme):
            raise BadParameter(
                f"{where} names the host {host[:80]!r}, port {port}, which is not among those that "
                "--allow-image-hosts allows"
            )
        return parts, host, port

    async def _resolve(self, host: str, port: int, where: str) -> str:
        """One address of `host`; all of them must be allowed."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(where_to[0]) for *_, where_to in found]
        for text in addresses:
            if not self._hosts.reachable(ipaddress.ip_address(text.partition("%")[0])):
                raise BadParameter(
                    f"{where} names a host whose address is private or reserved; name that address "
                    "with --allow-image-hosts if it is meant"
                )
        if not addresses:
            raise BadParameter(f"{where} names a host without an address")
        return addresses[0]

    async def _get(
        self, parts: SplitResult, host: str, port: int, address: str, where: str
    ) -> bytes | str:
        """The body, or where it redirects to."""
        tls = None
        if parts.scheme == "https":
            tls = self._tls = self._tls or ssl.create_default_context()
        reader, writer = await asyncio.open_connection(
            address, port, ssl=tls, server_hostname=host if tls else None
        )
        try:
            wire = h11.Connection(h11.CLIENT)
            name = f"[{host}]" if ":" in host else host
            shown = name if port == PORTS[parts.scheme] else f"{name}:{port}"
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = [
                ("Host", shown),
                ("User-Agent", "edgevlm"),
                ("Accept", "image/*"),
                ("Accept-Encoding", "identity"),
                ("Connection", "close"),
            ]
            sent = wire.send(h11.Request(method="GET", target=target, headers=headers))
            writer.write((sent or b"") + (wire.send(h11.EndOfMessage()) or b""))
            await writer.drain()
            return await self._read(wire, reader, where)
        finally:
            writer.close()
            with contextlib.suppress(Exception):
                await writer.wait_closed()

    async def _read(
        self, wire: h11.Connection, reader: asyncio.StreamReader, where: str
    ) -> bytes | str:
        body = bytearray()
        while True:
            event = wire.next_event()
            if event is h11.NEED_DATA:
                wire.receive_data(await reader.read(_READ))
            elif isinstance(event, h11.Response):
                headers = {k.decode("latin-1").lower(): v for k, v in event.headers}
                if event.status_code in (301, 302, 303, 307, 308) and b"location" in dict(
                    event.headers
                ):
                    return dict(event.headers)[b"location"].decode("latin-1")
                if event.status_code != 200:
                    raise BadImage(f"{where} was answered with status {event.status_code}")
                if headers.get("content-encoding", b"identity") not in (b"identity", b""):
                    raise BadImage(f"{where} was answered in an encoding that was not asked for")
                announced = headers.get("content-length", b"0")
                self._check_size(int(announced), where)
            elif isinstance(event, h11.Data):
                body += event.data
                self._check_size(len(body), where)
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError("the connection was closed early")

    def _check_size(self, size: int, where: str) -> None:
        if size > self._max_bytes:
            raise BadImage(
                f"{where} has {size:,} bytes or more; the limit is {self._max_bytes:,}: "
                "send it smaller, or start the service with a larger --max-image-bytes"
            )
