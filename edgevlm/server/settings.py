"""What a service was told on its command line, checked. Knows nothing about HTTP libraries."""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

from edgevlm.errors import EdgeVLMError

MIB = 1 << 20
TEXT_BYTES = MIB  # of a body, besides its pictures


class SettingsError(EdgeVLMError):
    """The service cannot start as it was told to."""


@dataclass(frozen=True)
class Settings:
    """Limits in bytes, pixels and seconds; None where there is no limit.

    | field             | meaning                                                              |
    |-------------------|----------------------------------------------------------------------|
    | api_keys          | any of them opens every route; none: no key is asked for             |
    | open_routes       | paths that need no key                                               |
    | allow_hosts       | more values that a Host header may have on loopback without a key    |
    | max_body          | of one request; all that are being read or prepared share twice that |
    | max_image_bytes   | of one encoded picture                                               |
    | max_image_pixels  | that a picture may have before it is resized                         |
    | allow_image_hosts | where pictures may be fetched from: names, *.names, IP addresses     |
    | image_folder      | where file: URLs may point                                           |
    | grace             | running answers get at SIGTERM                                       |
    | deadline          | of one answer, its waiting included                                  |
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    open_routes: frozenset[str] = frozenset({"/health"})
    allow_hosts: tuple[str, ...] = ()
    max_queue: int = 32
    max_body: int = 32 * MIB
    max_image_bytes: int = 8 * MIB
    max_image_pixels: int = 32 * MIB
    allow_image_hosts: tuple[str, ...] = ()
    image_folder: Path | None = None
    cors_origins: tuple[str, ...] = ()
    grace: float = 20.0
    deadline: float | None = None
    model_names: tuple[str, ...] = ()
    workers: int = 2
    body_timeout: float = 60.0
    header_timeout: float = 10.0
    idle_timeout: float = 30.0
    send_timeout: float = 60.0
    fetch_timeout: float = 15.0
    max_connections: int = 256
    access_log: bool = False

    @property
    def body_budget(self) -> int:
        """Bytes of bodies that may lie in memory together."""
        return 2 * self.max_body

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return all(ipaddress.ip_address(a).is_loopback for _, a in addresses(self.host, self.port))

    def check(self) -> None:
        """Raise SettingsError for what is not safe or cannot be."""
        if not self.loopback and not self.api_keys and not self.insecure:
            raise SettingsError(
                f"host {self.host} can be reached from other machines and no API key is set; give "
                "--api-key-file FILE, or --insecure if everybody on that network may use it"
            )
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or " " in key or not key:
                raise SettingsError("an API key must be printable ASCII without spaces")
        if "*" in self.cors_origins and not self.api_keys and not self.insecure:
            raise SettingsError(
                "--cors-origin * lets every web page use this service and no API key is set; "
                "name the origins, or give --api-key-file FILE"
            )
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise SettingsError(f"--image-folder {self.image_folder} is not a directory")


def default_max_body(max_image_bytes: int, max_images: int) -> int:
    """Room for every picture that may be sent, as base64, and for the text."""
    return TEXT_BYTES + max_images * -(-max_image_bytes * 4 // 3)


def addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """(family, address) of a host to listen on. Raises SettingsError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"host {host!r} is not an address to listen on: {error}") from None
    # A scope (fe80::1%eth0) is no part of the address.
    return [(family, str(where[0]).partition("%")[0]) for family, _, _, _, where in found]
