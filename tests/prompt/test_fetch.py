"""Fetching: which addresses are refused before a byte is sent, and which answers are."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfmagic.engine.prompt import fetch as module
from tfmagic.engine.prompt.fetch import fetch, public, target
from tfmagic.errors import Refusal

PUBLIC = "93.184.216.34"


@pytest.fixture
def web(monkeypatch):
    """Names that resolve, and hosts that answer with the given bytes."""

    class Web:
        names: dict[str, list[str]] = {}
        answers: list[bytes] = []
        asked: list[tuple[str, str, bytes]] = []
        drip = 0.0

    web = Web()
    web.names, web.answers, web.asked = {"a.example": [PUBLIC]}, [], []

    def getaddrinfo(host, port, **kwargs):
        if host not in web.names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in web.names[host]]

    def serve(wire, host, address):
        with wire:
            web.asked.append((host, address, wire.recv(65536)))
            answer = web.answers.pop(0)
            try:
                step = 50 if web.drip else 100_000
                for i in range(0, len(answer), step):
                    wire.sendall(answer[i : i + step])
                    time.sleep(web.drip)
            except OSError:
                pass

    def dial(host, address, deadline):
        ours, theirs = socket.socketpair()
        ours.settimeout(5)
        threading.Thread(target=serve, args=(theirs, host, address), daemon=True).start()
        return ours

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(module, "dial", dial)
    return web


def answer(body=b"", status="200 OK", **headers):
    headers = {"Content_Type": "image/png", "Content_Length": str(len(body))} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def test_an_image_is_fetched_from_the_checked_address(web):
    web.answers = [answer(b"bytes")]
    assert fetch("https://a.example/x.png?y=1", 100) == b"bytes"
    host, address, request = web.asked[0]
    assert (host, address) == ("a.example", PUBLIC)
    assert request.startswith(b"GET /x.png?y=1 HTTP/1.1\r\nHost: a.example\r\n")
    assert b"Accept-Encoding: identity\r\n" in request


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/x.png", "ftp://a.example/x", "file:///etc/passwd", "data:image/png;base64,xx", "a.example/x",
        "//a.example/x", "https://", "https:///x", "https://user@a.example/", "https://u:p@a.example/",
        "https://a.example:444/", "https://a.example:x/", "https://a.example:99999/", "https://[::1/x",
        "https://a.example/x#y", "https://a.example\\@b.example/", "https://a.example/ x", "https://a.example/\n",
        "https://a.example/\x00", "https://a.example/é", "https://exämple/", "https://a.example/" + "x" * 4096, "",
    ],
)  # fmt: skip
def test_addresses_that_are_refused_by_their_form(web, url):
    with pytest.raises(Refusal) as refusal:
        fetch(url, 100)
    assert not web.asked
    assert "\n" not in refusal.value.problem + refusal.value.fix


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.", "x.localhost", "printer.local", "metadata.google.internal", "metadata", "db.internal"],
)
def test_names_of_the_local_network(web, host):
    web.names[host.lower().rstrip(".")] = [PUBLIC]
    with pytest.raises(Refusal, match="not on the public internet"):
        fetch(f"https://{host}/x.png", 100)


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255",
    "224.0.0.1", "240.0.0.1", "192.0.0.8", "192.0.0.9", "192.0.2.1", "198.18.0.1", "168.63.129.16", "::1", "::",
    "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1",
    "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "64:ff9b::7f00:1", "2001:db8::1", "nonsense", "",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(web, address):
    assert not public(address)
    web.names["a.example"] = [PUBLIC, address]
    with pytest.raises(Refusal, match="not on the public internet"):
        fetch("https://a.example/x.png", 100)
    assert not web.asked


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:830::200e"])
def test_addresses_that_are_public(address):
    assert public(address)


def test_spellings_of_numbers_are_resolved_and_checked_too(web):
    for host in ("127.0.0.1", "2130706433", "0x7f000001", "127.1"):
        web.names[host] = ["127.0.0.1"]
        with pytest.raises(Refusal, match="not on the public internet"):
            fetch(f"https://{host}/", 100)


def test_a_redirect_is_checked_anew(web):
    web.names |= {"b.example": [PUBLIC], "evil.example": ["169.254.169.254"]}
    web.answers = [answer(status="302 Found", Location="https://b.example/y"), answer(b"there")]
    assert fetch("https://a.example/x", 100) == b"there"
    for place in ("https://evil.example/", "http://b.example/", "https://localhost/", "//127.0.0.1/", "file:///x"):
        web.answers = [answer(status="301 Moved", Location=place)]
        with pytest.raises(Refusal):
            fetch("https://a.example/x", 100)


def test_redirects_end(web):
    web.answers = [answer(status="307 T", Location="/x")] * 3 + [answer(b"end")]
    assert fetch("https://a.example/x", 100) == b"end"
    web.answers = [answer(status="307 T", Location="/x")] * 9
    with pytest.raises(Refusal, match="redirects more than 3 times"):
        fetch("https://a.example/x", 100)
    assert len(web.answers) == 5


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (answer(b"x", "404 Not Found"), "answered 404"),
        (answer(b"x", "302 Found"), "answered 302"),
        (answer(b"x", Content_Type="text/html"), "sent no PNG, JPEG or WebP"),
        (answer(b"x", Content_Type=None), "sent no PNG"),
        (answer(b"x", Content_Encoding="gzip"), "sent no PNG"),
        (answer(b"x" * 101), "has 101 bytes; 100 are read"),
        (answer(b"x" * 101, Content_Length=None), "more than 100 bytes"),
        (answer(b"x" * 50, Content_Length="60"), "could not be read"),
        (answer(b"ffffffff\r\n" + b"x" * 500, Content_Length=None, Transfer_Encoding="chunked"), "more than 100 bytes"),
        (b"no http at all\r\n\r\n", "could not be read"),
        (b"", "could not be read"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000, "could not be read"),
    ],
)
def test_answers_that_are_refused(web, reply, match):
    web.answers = [reply]
    with pytest.raises(Refusal, match=match) as refusal:
        fetch("https://a.example/x", 100)
    assert "\n" not in refusal.value.problem + refusal.value.fix


SLOW = [answer(b"x" * 5000), answer(b"x" * 5000, Content_Length=None), b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500]


@pytest.mark.parametrize("slow", SLOW)
def test_a_dripping_host_is_cut_off(web, slow):
    web.answers, web.drip = [slow], 0.05
    started = time.monotonic()
    with pytest.raises(Refusal, match="it took too long"):
        fetch("https://a.example/x", 10_000, seconds=0.5)
    assert time.monotonic() - started < 2


def test_an_unknown_name(web):
    with pytest.raises(Refusal, match=r"nowhere\.example was not found"):
        fetch("https://nowhere.example/", 100)


@given(st.text(max_size=60))
def test_any_text_is_a_target_or_a_refusal(words):
    for url in (words, "https://" + words):
        try:
            host, path = target(url)
            assert host and path.startswith("/") and (host + path).isascii()
        except Refusal:
            pass


def test_a_certificate_that_is_not_the_hosts(monkeypatch, tmp_path):
    """A real TLS server of our own, with a certificate that nobody vouches for."""
    assert shutil.which("openssl"), "openssl is needed"
    pem = tmp_path / "server.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=a.example"]
    subprocess.run([*make, "-keyout", str(tmp_path / "key"), "-out", str(pem)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            wire, _ = server.accept()
            with wire, pytest.raises(OSError):
                context.wrap_socket(wire, server_side=True).recv(1)

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setattr(module, "addresses", lambda host, deadline: ["127.0.0.1"])
        monkeypatch.setattr(module, "PORT", server.getsockname()[1])
        monkeypatch.setattr(module, "target", lambda url: ("a.example", "/"))
        with pytest.raises(Refusal, match="CERTIFICATE_VERIFY_FAILED"):
            fetch("https://a.example/", 100)
