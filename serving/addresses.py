"""Addresses that a server listens on, as each part of Triton wants them written, and as this machine reaches them."""

import socket

from serving.errors import StartError

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def resolved(host: str) -> str:
    """Return the address of a host, of version 4 where it has one; raise StartError if it has none.

    Triton's HTTP takes addresses alone: from a name it makes 255.255.255.255.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise StartError(f"host {host!r} has no address ({error}); give one, such as 127.0.0.1 or ::1") from error
    return str(min(found, key=lambda each: each[0] == socket.AF_INET6)[4][0])


def family_of(address: str) -> socket.AddressFamily:
    """Return the kind of sockets that an address takes."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def spelt(address: str) -> tuple[str, str]:
    """Return an address as Triton's HTTP and metrics want it written, and as its gRPC does."""
    return (f"ipv6:{address}", f"[{address}]") if family_of(address) == socket.AF_INET6 else (address, address)


def reached(address: str) -> str:
    """Return the address at which this machine reaches what listens on one: of all addresses, loopback."""
    return _ANY.get(address, address)


def at(address: str, port: int | str) -> str:
    """Return host:port for what listens on an address, as this machine reaches it."""
    return f"{spelt(reached(address))[1]}:{port}"
