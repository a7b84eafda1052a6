"""How a service is run: where it listens, how it batches, what it refuses."""

from __future__ import annotations

import ipaddress
import math
import socket
from dataclasses import dataclass
from pathlib import Path

from inlay.errors import InlayError

SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class ServiceSettings:
    """`max_wait`, `timeout` and `read_timeout` are in seconds, `max_body` in bytes, `max_queue` in rows.

    `max_characters` bounds a text (None: 100 characters for each token of the task's `max_length`, or of the context of
    a model with prompts, 20,000 at least), `max_pixels` an image, `max_tokens` the answer of a model with prompts;
    `max_connections` those of all clients, `max_per_client` those of one address (None: half of them). Port 0 takes any
    that is free.

    Anyone who can reach the service can use it: on an address other than loopback it needs a token.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    max_batch: int = 64
    max_wait: float = 0.005
    max_queue: int = 1024
    max_body: float = 4 << 20
    timeout: float = 30.0
    add_from: Path | None = None
    max_characters: int | None = None
    max_pixels: int = 25_000_000
    max_connections: int = 1024
    max_per_client: int | None = None
    read_timeout: float = 30.0
    max_tokens: int = 512

    def __post_init__(self) -> None:
        bounds = ("max_batch", "max_queue", "max_body", "max_pixels", "max_connections", "max_tokens")
        for name in (*bounds, "max_characters", "max_per_client"):
            value = getattr(self, name)
            if not (value is None and name not in bounds) and not 1 <= value < math.inf:
                raise InlayError(f"{name}={value!r}: give a number from 1.")
        if not 0 <= self.max_wait <= 60:
            raise InlayError(f"max_wait={self.max_wait!r} is a time to wait for more rows: 0 to 60 seconds.")
        for name in ("timeout", "read_timeout"):
            if not 0 < getattr(self, name) <= 3600:
                raise InlayError(f"{name}={getattr(self, name)!r}: give a time above 0 and up to 3600 seconds.")
        if not 0 <= self.port <= 65535:
            raise InlayError(f"port={self.port!r}: a port is a number from 1 to 65535, or 0 for any that is free.")
        if self.token is not None and (len(self.token) < SHORTEST_TOKEN or not self.token.isascii()):
            raise InlayError(
                f"The token is to be at least {SHORTEST_TOKEN} plain characters long: "
                'python -c "import secrets; print(secrets.token_urlsafe())" makes one.'
            )
        if self.token is None and not self.is_local:
            raise InlayError(
                f"--host {self.host} can be reached from other machines, and whoever reaches the service may use it. "
                "Give a token (INLAY_TOKEN in the environment, or --token-file), or stay on 127.0.0.1."
            )

    @property
    def is_local(self) -> bool:
        """Whether nothing but this machine can reach the address."""
        return all(ipaddress.ip_address(address).is_loopback for _, address in self._addresses())

    def bind(self) -> socket.socket:
        """The socket, bound but not listening yet."""
        family, address = self._addresses()[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((address, self.port))
        except OSError as error:
            bound.close()
            raise InlayError(
                f"Cannot listen on {self.host}, port {self.port}: {error.strerror}. Give another --port (0: any)."
            ) from None
        return bound

    def _addresses(self) -> list[tuple[socket.AddressFamily, str]]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise InlayError(f"--host {self.host!r} is no address of this machine: {error}. Try 127.0.0.1.") from None
        return [(family, str(address[0]).partition("%")[0]) for family, _, _, _, address in found]
