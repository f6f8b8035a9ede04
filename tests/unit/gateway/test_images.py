"""Images: as transformers prepares them, within limits, and fetched from nowhere but allowed public hosts."""

from __future__ import annotations

import asyncio
import base64
import io
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ryzanstein.v1 import worker_pb2

from services.common.tls.certificate import Identity
from services.common.tls.issuing import Authority
from services.gateway.api.chat import Turn
from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.api.images import GivenImage
from services.gateway.errors import ApiError
from services.gateway.images.decoding import ImageLimits, decoded, from_base64
from services.gateway.images.fetching import FetchPolicy, ImageFetcher, is_public
from services.gateway.images.idefics3 import IDEFICS3
from services.gateway.images.reader import ImageReader, expanded, layout_of, without_images
from services.gateway.settings import GatewaySettings
from services.gateway.text.codec import ServedModel
from tests.seeing_model import (
    FRAME,
    FRAME_TOKENS,
    MOST,
    encoded,
    image_processor,
    picture,
    processor,
    write_seeing_model,
)

LIMITS = ImageLimits(count=3, n_bytes=1_000_000, pixels=1_000_000)
CARD = worker_pb2.ImageInput(
    layout="idefics3",
    frame_tokens=FRAME_TOKENS,
    frame_size=FRAME,
    longest_edge=MOST * FRAME,
    splits=True,
    resample="lanczos",
)
SIZES = [(200, 120), (120, 200), (84, 84), (28, 28), (7, 300), (301, 6), (20, 20), (85, 83), (1, 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ServedModel]:
    folder = tmp_path_factory.mktemp("seeing")
    config = write_seeing_model(folder).config
    card = worker_pb2.ModelCard(
        model="seeing", max_model_len=2048, tokenizer_json=(folder / "tokenizer.json").read_bytes(), images=CARD
    )
    card.images.token = config.image_token_id
    return folder, ServedModel.from_card(card)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [True, False])
def test_frames_and_tokens_equal_transformers(
    model: tuple[Path, ServedModel], size: tuple[int, int], splits: bool
) -> None:
    image, (folder, served) = picture(*size), model
    cut = IDEFICS3.cut(image, CARD, splits=splits)
    expected = image_processor().preprocess(
        [[image]], do_normalize=False, do_rescale=False, do_image_splitting=splits, return_tensors="pt"
    )
    frames = torch.stack([torch.from_numpy(np.array(frame)).permute(2, 0, 1) for frame in cut.frames])
    assert torch.equal(frames, expected["pixel_values"][0].to(torch.uint8))
    if splits:
        text = "<|user|><image>Look.<|end|>"
        ids = served.tokenizer.encode(text, add_special_tokens=False).ids
        (seen,) = asyncio.run(read([given({"data": encoded(image)})], served))
        prompt, (placed,) = expanded(ids, [seen], served, IDEFICS3, "messages")
        assert prompt == processor(folder)(text=text, images=[[image]])["input_ids"][0]
        assert prompt[placed.first : placed.first + placed.tokens].count(CARD.token or served.card.images.token) == (
            len(cut.frames) * FRAME_TOKENS
        )
        assert len(placed.frames) == len(cut.frames) * 3 * FRAME**2


def given(value: dict[str, Any], kind: str = "image", **more: Any) -> GivenImage:
    return GivenImage(Unserved(kind, {"type": kind, **value}), "messages[0].content[1]", "messages[].content[]", **more)


async def read(images: Sequence[GivenImage], model: ServedModel, fetcher: ImageFetcher | None = None) -> Any:
    layout = layout_of(model)
    assert layout is not None
    reader = ImageReader(LIMITS, fetcher or ImageFetcher(FetchPolicy()))
    return await reader.read([Turn("user", ["a", *images])], model, layout)


PNG = encoded(picture(40, 30))
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("image_url", {"image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "high"}}),
    ("image_url", {"image_url": f"data:image/png;base64,{PNG}"}),
    ("input_image", {"image_url": f"data:image/png;base64,{PNG}"}),
    ("image", {"source": {"type": "base64", "media_type": "image/png", "data": PNG}}),
    ("image", {"data": PNG, "mimeType": "image/png"}),
]


@pytest.mark.parametrize(("kind", "value"), FORMS)
async def test_image_in_every_form_is_read(kind: str, value: dict[str, Any], model: tuple[Path, ServedModel]) -> None:
    (seen,) = await read([given(value, kind)], model[1])
    (same,) = await read([given({"data": encoded(picture(40, 30))})], model[1])
    assert seen == same
    (low,) = await read([given({"detail": "low", "data": PNG})], model[1])
    assert (len(low.frames), low.digest == seen.digest) == (3 * FRAME**2, False)


def bomb() -> str:
    buffer = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def turned() -> Image.Image:
    """A picture of which its camera says that it lies on its side."""
    image, exif = picture(40, 20), Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, quality=95)
    return Image.open(buffer)


async def test_image_is_upright_and_in_rgb() -> None:
    buffer = io.BytesIO()
    turned().save(buffer, "PNG", exif=turned().getexif())
    assert decoded(buffer.getvalue(), "f", LIMITS).size == (20, 40)
    for mode in ("RGBA", "L", "P", "CMYK", "1", "I;16"):
        buffer, kind = io.BytesIO(), "JPEG" if mode == "CMYK" else "PNG"
        Image.new(mode, (3, 2)).save(buffer, kind)
        assert decoded(buffer.getvalue(), "f", LIMITS).mode == "RGB"


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"data": "no base64!"}, "invalid_image", "no base64"),
    ({"data": base64.b64encode(b"text").decode()}, "invalid_image", "none of PNG, JPEG, WEBP, GIF"),
    ({"data": encoded(picture(9, 9), "BMP")}, "invalid_image", "none of PNG"),
    ({"data": PNG[: len(PNG) // 8 * 4]}, "invalid_image", "broken or cut off"),
    ({"data": ""}, "invalid_image", "none of PNG"),
    ({"data": encoded(Image.new("RGB", (1200, 900)))}, "invalid_image", "1200 x 900 pixels; at most 1000000"),
    ({"data": "A" * 2_000_000}, "invalid_image", "more than 1000000 bytes"),
    ({"url": "data:image/png,abc"}, "invalid_image", "not in base64"),
    ({"url": "https://example.com/a.png"}, "image_not_fetched", "images are not fetched here"),
    ({"url": "file:///etc/passwd"}, "image_not_fetched", "images are not fetched here"),
    ({"file_id": "file-1"}, "invalid_image", "has no image"),
    ({"url": 3}, "invalid_image", "has no image"),
]


@pytest.mark.parametrize(("value", "code", "message"), BROKEN)
async def test_broken_image_is_refused_by_its_field(
    value: dict[str, Any], code: str, message: str, model: tuple[Path, ServedModel]
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        await read([given(value)], model[1])
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages[0].content[1]", code)


def test_decompression_bomb_is_refused() -> None:
    for limits in (LIMITS, ImageLimits(1, 10**9, 10**10)):
        with pytest.raises(ApiError, match="pixels"):
            decoded(base64.b64decode(bomb()), "f", limits)


async def test_too_many_images_are_refused(model: tuple[Path, ServedModel]) -> None:
    with pytest.raises(ApiError, match="at most 3 images, got 4"):
        await read([given({"data": PNG})] * 4, model[1])


async def test_images_that_fill_a_message_to_a_worker_are_refused(
    model: tuple[Path, ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.images.reader.MAX_FRAME_BYTES", 3 * 10 * FRAME**2)
    with pytest.raises(ApiError, match=r'"detail": "low"'):
        await read([given({"data": encoded(picture(84, 84))})] * 2, model[1])


def test_base64_of_a_whole_image_is_within_its_limit() -> None:
    data = bytes(LIMITS.n_bytes)
    assert from_base64(base64.b64encode(data).decode(), "f", LIMITS) == data


def test_model_without_eyes_refuses_new_images() -> None:
    ignored, error = Ignored(), ApiError(400, "no eyes", "invalid_request_error")
    old = Turn("tool", ["a", given({"data": PNG})])
    (turn,) = without_images([old], ignored)
    assert turn.parts == ["a", "[The image that stood here was left out: this model reads text only.]"]
    assert ignored.header == "messages[].content[].type=image"
    with pytest.raises(ApiError, match="no eyes"):
        without_images([old, Turn("user", [given({"data": PNG}, refusal=error)])], ignored)


def test_prompt_with_other_places_than_images_is_refused(model: tuple[Path, ServedModel]) -> None:
    with pytest.raises(ApiError, match="0 places for 1 images"):
        expanded([5, 6], [object()], model[1], IDEFICS3, "messages")  # type: ignore[list-item]


def test_card_of_an_unknown_layout_is_one_of_text(model: tuple[Path, ServedModel]) -> None:
    card = worker_pb2.ModelCard()
    card.CopyFrom(model[1].card)
    card.images.layout = "newer"
    assert layout_of(ServedModel(card, model[1].tokenizer, model[1].vocabulary, None)) is None


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
    "64:ff9b::a00:1", "2002:7f00:1::", "2001:0:a00:1::1", "ff02::1",
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
class Host:
    """A host of images by TLS, at a name that resolves to this machine."""

    policy: FetchPolicy
    port: int
    answers: dict[str, bytes] = field(default_factory=dict)  # by path

    def url(self, path: str) -> str:
        return f"https://localhost:{self.port}{path}"


@asynccontextmanager
async def hosting(folder: Path, **changed: Any) -> AsyncIterator[Host]:
    authority = Authority.new(timedelta(days=1))
    issued = authority.issue(Identity("rz.llm", "public"), timedelta(days=1), hosts=["localhost"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, content in (("crt", issued.certificate), ("key", issued.key)):
        (folder / name).write_bytes(content)
    tls.load_cert_chain(folder / "crt", folder / "key")
    trusting = ssl.create_default_context(cadata=authority.own.certificate.decode())
    host: Host

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
    host = Host(FetchPolicy(**chosen | changed), port)
    async with server:
        yield host


def http(status: str = "200 OK", body: bytes = b"", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


async def test_image_of_an_allowed_host_is_fetched(tmp_path: Path, model: tuple[Path, ServedModel]) -> None:
    async with hosting(tmp_path) as host:
        host.answers["/a.png"] = http(body=base64.b64decode(PNG), content_type="image/png")
        host.answers["/moved"] = http("302 Found", location="/a.png")
        expected = await read([given({"data": PNG})], model[1])
        for path in ("/a.png", "/moved"):
            value = {"source": {"type": "url", "url": host.url(path)}}
            assert await read([given(value)], model[1], ImageFetcher(host.policy)) == expected


REFUSED: list[tuple[str, bytes, str]] = [
    ("/loop", http("302 Found", location="/loop"), "redirects too often"),
    ("/away", http("302 Found", location="https://elsewhere.example/a.png"), "is not fetched"),
    ("/plain", http("301 Moved", location="http://localhost/a.png"), "is not fetched"),
    ("/inside", http("307 Away", location="https://169.254.169.254/latest"), "is not fetched"),
    ("/page", http(body=b"<html>", content_type="text/html"), "sends no image"),
    ("/missing", http("404 Not Found"), "answers with 404"),
    ("/large", http(body=bytes(1_000_001), content_type="image/png"), "more than 1000000 bytes"),
    ("/cut", http(body=b"", content_type="image/png").replace(b"length: 0", b"length: 9"), "breaks off"),
    ("/noise", b"what?\r\n\r\n", "breaks off"),
]


@pytest.mark.parametrize(("path", "answer", "message"), REFUSED)
async def test_host_that_gives_no_image_is_refused(path: str, answer: bytes, message: str, tmp_path: Path) -> None:
    async with hosting(tmp_path) as host:
        host.answers[path] = answer
        with pytest.raises(ApiError, match=message) as caught:
            await ImageFetcher(host.policy).fetch(host.url(path), "f", LIMITS)
        assert (caught.value.status, caught.value.param) == (400, "f")


async def test_slow_host_is_given_up(tmp_path: Path) -> None:
    async with hosting(tmp_path, timeout_s=0.3) as host:
        host.answers["/hang"] = b""
        with pytest.raises(ApiError, match=r"took longer than 0\.3 s"):
            await ImageFetcher(host.policy).fetch(host.url("/hang"), "f", LIMITS)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], []])
async def test_host_with_a_private_address_is_not_connected_to(addresses: list[str], tmp_path: Path) -> None:
    async def resolve(_name: str, _port: int) -> Sequence[str]:
        return addresses

    async with hosting(tmp_path, resolve=resolve, allows=is_public) as host:
        with pytest.raises(ApiError, match="is not fetched"):
            await ImageFetcher(host.policy).fetch(host.url("/a.png"), "f", LIMITS)


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/",
        "https://user@localhost:{port}/",
        "https://[::1]/",
        "https://localhost:99999/",
        "https://localhost:{port}/ü",
    ],
)
async def test_other_url_is_not_fetched(url: str, tmp_path: Path) -> None:
    async with hosting(tmp_path) as host:
        with pytest.raises(ApiError, match=r"is not fetched|URL is invalid"):
            await ImageFetcher(host.policy).fetch(url.format(port=host.port), "f", LIMITS)
