"""Images are fetched from allowed public hosts, and from nowhere else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from services.common.tls.certificate import Identity
from services.common.tls.issuing import Authority
from services.gateway.errors import ApiError
from services.gateway.images.decoding import ImageLimits
from services.gateway.images.fetching import FetchPolicy, ImageFetcher, is_public
from services.gateway.settings import GatewaySettings

LIMITS = ImageLimits(count=3, n_bytes=1_000_000, pixels=1_000_000)


@pytest.mark.parametrize("hosts", ["https://a.example", "a.example/", "*", "a b", "a.example:x", "*.*.example"])
def test_setting_with_another_form_of_host_is_refused(hosts: str) -> None:
    with pytest.raises(ValueError, match=r"none of host, host:port, \*\.domain"):
        GatewaySettings(image_hosts=hosts)  # type: ignore[arg-type]


def test_setting_of_hosts_is_a_list_in_lower_case() -> None:
    settings = GatewaySettings(image_hosts="A.example, *.b.example,c.example:8443")  # type: ignore[arg-type]
    assert settings.image_hosts == ("a.example", "*.b.example", "c.example:8443")


PRIVATE = (
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "::ffff:a00:1",
    "64:ff9b::a00:1", "2002:7f00:1::", "2001:0:a00:1::1", "ff02::1", "::127.0.0.1", "::a9fe:a9fe", "::ffff:0:a00:1",
    "64:ff9b:1::a00:1", "fec0::1", "5f00::1", "3fff::1", "2001:db8::1", "192.0.0.9", "192.88.99.1", "198.18.0.1",
    "240.0.0.1",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_address_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]
)
def test_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("host", "port", "permitted"),
    [
        ("a.example", 443, True),
        ("a.example", 8443, False),
        ("b.example", 8443, True),
        ("x.c.example", 443, True),
        ("c.example", 443, False),
        ("xc.example", 443, False),
        ("a.example.evil", 443, False),
    ],
)
def test_list_of_hosts_is_exact(host: str, port: int, permitted: bool) -> None:
    assert FetchPolicy(("a.example", "b.example:8443", "*.c.example")).permits(host, port) is permitted


@dataclass
class ImageHost:
    """A host of images by TLS, at a name that resolves to this machine."""

    policy: FetchPolicy
    port: int
    answers: dict[str, bytes] = field(default_factory=dict)  # by path

    def url(self, path: str) -> str:
        return f"https://localhost:{self.port}{path}"


@cache
def both_ends() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The TLS of the host and that of its clients."""
    authority = Authority.new(timedelta(days=1))
    issued = authority.issue(Identity("rz.llm", "public"), timedelta(days=1), hosts=["localhost"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with TemporaryDirectory() as folder:
        for name, content in (("crt", issued.certificate), ("key", issued.key)):
            Path(folder, name).write_bytes(content)
        tls.load_cert_chain(Path(folder, "crt"), Path(folder, "key"))
    return tls, ssl.create_default_context(cadata=authority.own.certificate.decode())


@asynccontextmanager
async def hosting(**changed: Any) -> AsyncIterator[ImageHost]:
    tls, trusting = both_ends()
    host: ImageHost

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(host.answers[head.split()[1].decode()])
        if b"hang" not in head:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]

    async def to_here(_name: str, _port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    chosen: dict[str, Any] = {
        "hosts": (f"localhost:{port}",), "resolve": to_here, "allows": lambda _address: True, "tls": trusting,
        "timeout_s": 60.0,
    }  # fmt: skip
    host = ImageHost(FetchPolicy(**chosen | changed), port)
    async with server:
        yield host


def http(status: str = "200 OK", body: bytes = b"", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


REFUSED: list[tuple[str, bytes, str]] = [
    ("/loop", http("302 Found", location="/loop"), "redirects too often"),
    ("/away", http("302 Found", location="https://elsewhere.example/a.png"), "is not fetched"),
    ("/plain", http("301 Moved", location="http://localhost/a.png"), "is not fetched"),
    ("/inside", http("307 Away", location="https://169.254.169.254/latest"), "is not fetched"),
    ("/odd", http("302 Found", location="https://[x/"), "redirects to an invalid URL"),
    ("/spaced", http("302 Found", location="https://local host/"), "URL is invalid"),
    ("/named", http("302 Found", location="https://localhost@elsewhere.example/"), "is not fetched"),
    ("/mapped", http("302 Found", location="https://[::ffff:127.0.0.1]/"), "is not fetched"),
    (
        "/endless",
        http(content_type="image/png", transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
        + (b"40000\r\n" + bytes(0x40000) + b"\r\n") * 5,
        "more than 1000000 bytes",
    ),
    ("/head", b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000, "breaks off"),
    ("/page", http(body=b"<html>", content_type="text/html"), "sends no image"),
    ("/missing", http("404 Not Found"), "answers with 404"),
    ("/large", http(body=bytes(1_000_001), content_type="image/png"), "more than 1000000 bytes"),
    ("/cut", http(body=b"", content_type="image/png").replace(b"length: 0", b"length: 9"), "breaks off"),
    ("/noise", b"what?\r\n\r\n", "breaks off"),
]


@pytest.mark.parametrize(("path", "answer", "message"), REFUSED)
async def test_host_that_gives_no_image_is_refused(path: str, answer: bytes, message: str) -> None:
    async with hosting() as host:
        host.answers[path] = answer
        with pytest.raises(ApiError, match=message) as caught:
            await ImageFetcher(host.policy).fetch(host.url(path), "f", LIMITS)
        assert (caught.value.status, caught.value.param) == (400, "f")


async def test_slow_host_is_given_up() -> None:
    async with hosting(timeout_s=0.3) as host:
        host.answers["/hang"] = b""
        with pytest.raises(ApiError, match=r"took longer than 0\.3 s"):
            await ImageFetcher(host.policy).fetch(host.url("/hang"), "f", LIMITS)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], []])
async def test_host_with_a_private_address_is_not_connected_to(addresses: list[str]) -> None:
    async def resolve(_name: str, _port: int) -> Sequence[str]:
        return addresses

    async with hosting(resolve=resolve, allows=is_public) as host:
        with pytest.raises(ApiError, match="is not fetched"):
            await ImageFetcher(host.policy).fetch(host.url("/a.png"), "f", LIMITS)


@pytest.mark.parametrize("path", ["/a.png", "/moved"])
async def test_address_of_a_host_is_checked_at_each_connection(path: str) -> None:
    """A request has one look-up, whose address it connects to; a redirect has the next one."""
    answers = iter(["127.0.0.1", "127.0.0.2"])

    async def resolve(_name: str, _port: int) -> Sequence[str]:
        return [next(answers)]

    async with hosting(resolve=resolve, allows=lambda address: address == "127.0.0.1") as host:
        host.answers["/a.png"] = http(body=b"image", content_type="image/png")
        host.answers["/moved"] = http("302 Found", location="/a.png")
        fetch = ImageFetcher(host.policy).fetch(host.url(path), "f", LIMITS)
        if path == "/a.png":
            assert await fetch == b"image"
        else:
            with pytest.raises(ApiError, match="is not fetched"):
                await fetch


async def test_address_that_refuses_is_passed_over() -> None:
    async def resolve(_name: str, _port: int) -> Sequence[str]:
        return ["127.0.0.9", "127.0.0.1"]

    async with hosting(resolve=resolve) as host:
        host.answers["/a.png"] = http(body=b"image", content_type="image/png")
        assert await ImageFetcher(host.policy).fetch(host.url("/a.png"), "f", LIMITS) == b"image"


LISTED = ("a.example", "*.c.example", "127.0.0.1", "127.1", "2130706433", "0177.0.0.1", "0x7f000001")


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/", "ftp://a.example/", "file:///etc/passwd", "//a.example/", "https:a.example", "https:///a",
        "https://user@a.example/", "https://:@a.example/", "https://a.example@elsewhere.example/",
        "https://elsewhere.example#@a.example/", "https://a.example\\@elsewhere.example/", "https://[::1]/",
        "https://[::ffff:127.0.0.1]/", "https://[a.example]/", "https://a.example:99999/", "https://a.example:0/",
        "https://a.example:8443/", "https://a.example:\u0664\u0664\u0663/", "https://a.example/\u00fc",
        "https://a.exa\tmple/", "https://a.example/\r\nHost: b", " https://a.example/", "https://a.example./",
        "https://.c.example/", "https://a..c.example/", f"https://{'a' * 64}.c.example/",
        f"https://{'a.' * 130}c.example/", "https://x.c.example%00.elsewhere.example/",
        "https://127.0.0.1/", "https://127.1/", "https://2130706433/", "https://0177.0.0.1/", "https://0x7f000001/",
    ],
)  # fmt: skip
async def test_other_url_is_not_fetched(url: str) -> None:
    """Also where the list names a host whose address is private, in any spelling."""
    with pytest.raises(ApiError, match=r"is not fetched|URL is invalid"):
        await ImageFetcher(FetchPolicy(LISTED, timeout_s=60)).fetch(url, "f", LIMITS)
