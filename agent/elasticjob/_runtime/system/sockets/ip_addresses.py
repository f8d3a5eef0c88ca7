"""IP addresses and endpoints as text, of both families. Pure."""

from __future__ import annotations

import ipaddress


def plain_address(host: str) -> str:
    """Return the address of a socket as other programs write it.

    An IPv6 socket shows an IPv4 address as `::ffff:10.0.0.1`, and a link-local IPv6 address with a zone.
    """
    return host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]


def endpoint_text(host: str, port: int) -> str:
    """Return host:port, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(text: str, default_port: str) -> tuple[str, str]:
    """Return host and port of HOST, HOST:PORT, an address of IPv6, [ADDRESS] or [ADDRESS]:PORT."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":") or default_port
    host, colon, port = text.partition(":")
    return (text, default_port) if not colon or ":" in port else (host, port)


def is_loopback(host: str) -> bool:
    """Return whether the text is a loopback address, which no other host reaches. A host name counts as another one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
