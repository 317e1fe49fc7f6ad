"""Fetching an image by its address: https alone, from public addresses alone, within bounds of time and size.

An address typed into a prompt must not become a way into the network that the engine runs in: every address that the
host's name resolves to is checked, the connection goes to a checked one, and each redirect is checked anew.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address
from threading import Timer
from urllib.parse import urljoin, urlsplit

from tfmagic.errors import Refusal

PORT = 443
MAX_URL = 4096
REDIRECTS = 3
TYPES = ("image/png", "image/jpeg", "image/webp")
LOCAL = ("localhost", "local", "internal", "metadata", "instance-data", "home.arpa")
"""Names, and the ends of names, that mean this machine, its network or its cloud."""
CLOUD = (IPv4Network("192.0.0.0/24"), IPv4Network("168.63.129.16/32"))
"""Not for the public, though some of it counts as global."""
UNICAST = IPv6Network("2000::/3")
ELSEWHERE = "Download it, and give the file or the bytes."

_resolvers = ThreadPoolExecutor(4, thread_name_prefix="resolve")


def fetch(url: str, max_bytes: int, seconds: float = 10.0) -> bytes:
    """The image at `url`, over all redirects within `seconds`. Raises Refusal naming the rule that it breaks."""
    deadline = time.monotonic() + seconds
    for _ in range(1 + REDIRECTS):
        host, path = target(url)
        address = addresses(host, deadline)[0]
        try:
            body, moved = get(host, address, path, max_bytes, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = "it took too long" if time.monotonic() >= deadline else str(error) or type(error).__name__
            raise Refusal(f"{host} could not be read: {' '.join(cause.split())[:160]}.", ELSEWHERE) from None
        if moved is None:
            return body
        url = urljoin(url, moved)
    raise Refusal(f"The image's address redirects more than {REDIRECTS} times.", ELSEWHERE)


def target(url: str) -> tuple[str, str]:
    """Host, and path with query, of an address that may be fetched."""
    if len(url) > MAX_URL:
        raise Refusal(f"The image's address has {len(url):,} characters.", f"At most {MAX_URL:,} are read.")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url or "#" in url:
        raise Refusal("The image's address holds a character that is none of an address.", "Percent-encode it.")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or PORT
    except ValueError:
        raise Refusal("The image's address is malformed.", "Check it.") from None
    if parts.scheme != "https" or "@" in parts.netloc or port != PORT or not host:
        raise Refusal("Images are fetched by https:// and a host's name alone: no login, no port.", ELSEWHERE)
    if any(host == name or host.endswith("." + name) for name in LOCAL):
        raise Refusal(f"{host} is not on the public internet.", ELSEWHERE)
    return host, (parts.path or "/") + ("?" + parts.query if parts.query else "")


def public(address: str) -> bool:
    """Whether anyone may be meant by it: global unicast, and no form that carries another address."""
    try:
        ip = ip_address(address)
    except ValueError:  # a scope, as in fe80::1%eth0
        return False
    if not ip.is_global or ip.is_multicast or ip.is_reserved:
        return False
    if isinstance(ip, IPv4Address):
        return not any(ip in network for network in CLOUD)
    return ip in UNICAST and not (ip.ipv4_mapped or ip.sixtofour or ip.teredo)


def addresses(host: str, deadline: float) -> list[str]:
    """What `host` resolves to. Raises Refusal unless all of it is public."""
    asked = _resolvers.submit(socket.getaddrinfo, host, PORT, type=socket.SOCK_STREAM)
    try:
        found = [entry[4][0] for entry in asked.result(max(0.0, deadline - time.monotonic()))]
    except (OSError, UnicodeError, TooLate):
        asked.cancel()
        raise Refusal(f"{host} was not found.", "Check the address and the network.") from None
    if not found or not all(map(public, found)):
        raise Refusal(f"{host} is not on the public internet.", ELSEWHERE)
    return found


def get(host: str, address: str, path: str, max_bytes: int, deadline: float) -> tuple[bytes, str | None]:
    """(body, None), or (b"", the place that a redirect names). Raises Refusal, OSError, HTTPException."""
    with dial(host, address, deadline) as wire:
        timer = Timer(max(0.0, deadline - time.monotonic()), cut, (wire,))  # however slowly bytes drip
        timer.daemon = True
        timer.start()
        try:
            if isinstance(wire, ssl.SSLSocket):
                wire.do_handshake()
            talk = http.client.HTTPConnection(host)
            talk.sock = wire
            talk.request("GET", path, headers={"Accept": ", ".join(TYPES), "Accept-Encoding": "identity"})
            answer = talk.getresponse()
            in_time(deadline)  # a wire cut within the headers reads as their end
            if answer.status in (301, 302, 303, 307, 308) and answer.getheader("Location"):
                return b"", answer.getheader("Location")
            check(answer, host, max_bytes)
            body = answer.read(max_bytes + 1)
            in_time(deadline)
        finally:
            timer.cancel()
    if answer.length:
        raise http.client.IncompleteRead(body)
    if len(body) > max_bytes:
        raise Refusal(f"The image at {host} has more than {max_bytes:,} bytes.", "Make it smaller.")
    return body, None


def cut(wire: socket.socket) -> None:
    """End every read of the wire, TLS or not (an SSLSocket's own shutdown would go on in plain text)."""
    with suppress(OSError):
        socket.socket.shutdown(wire, socket.SHUT_RDWR)


def in_time(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError


def dial(host: str, address: str, deadline: float) -> socket.socket:
    """A connection to the address, TLS not yet shaken; the certificate must be `host`'s."""
    wire = socket.create_connection((address, PORT), timeout=max(0.1, deadline - time.monotonic()))
    return ssl.create_default_context().wrap_socket(wire, server_hostname=host, do_handshake_on_connect=False)


def check(answer: http.client.HTTPResponse, host: str, max_bytes: int) -> None:
    if answer.status != 200:
        raise Refusal(f"{host} answered {answer.status}.", "Check the address.")
    kind = answer.getheader("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in TYPES or answer.getheader("Content-Encoding", "identity") != "identity":
        raise Refusal(f"{host} sent no PNG, JPEG or WebP.", "Give the address of the picture itself, not of its page.")
    if answer.length is not None and answer.length > max_bytes:
        raise Refusal(f"The image at {host} has {answer.length:,} bytes; {max_bytes:,} are read.", "Make it smaller.")
