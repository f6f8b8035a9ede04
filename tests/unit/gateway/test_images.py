"""Images: as transformers prepares them, and within limits."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from ryzanstein.v1 import worker_pb2

from services.common.blockhash import image_digest
from services.gateway.api.chat import Turn
from services.gateway.api.ignored import Ignored, Unserved
from services.gateway.api.images import GivenImage
from services.gateway.errors import ApiError
from services.gateway.images.decoding import ImageLimits, decoded, from_base64
from services.gateway.images.fetching import FetchPolicy, ImageFetcher
from services.gateway.images.reader import ImageReader, layout_of, placed, without_images
from services.gateway.text.codec import ServedModel
from services.gateway.text.conversation import Conversation, encode_conversation
from tests.seeing_model import CELL, FAMILIES, FRAME, FRAME_TOKENS, encoded, picture
from tests.unit.gateway.test_image_fetching import hosting, http

LIMITS = ImageLimits(count=3, n_bytes=1_000_000, pixels=1_000_000)
SIZES = [(200, 120), (120, 200), (84, 84), (28, 28), (7, 300), (301, 6), (20, 20), (85, 83), (1, 1)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, ServedModel]]:
    @cache
    def served(layout: str) -> tuple[Path, ServedModel]:
        folder = tmp_path_factory.mktemp(layout)
        config = FAMILIES[layout].write(folder).config
        tokenizer = (folder / "tokenizer.json").read_bytes()
        card = worker_pb2.ModelCard(
            model="seeing",
            max_model_len=2048,
            tokenizer_json=tokenizer,
            chat_template=FAMILIES[layout].template,
            images=FAMILIES[layout].card,
        )
        card.images.token = config.image_token_id
        return folder, ServedModel.from_card(card)

    return served


@pytest.fixture(scope="module")
def model(models: Callable[[str], tuple[Path, ServedModel]]) -> ServedModel:
    return models("idefics3")[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("layout", "splits"), [("idefics3", True), ("idefics3", False), ("gemma3", False)])
async def test_frames_and_tokens_equal_transformers(
    models: Callable[[str], tuple[Path, ServedModel]], size: tuple[int, int], layout: str, splits: bool
) -> None:
    image, family, (folder, served) = picture(*size), FAMILIES[layout], models(layout)
    cutting = layout_of(served)
    assert cutting is not None
    cut = cutting.cut(image, served.card.images, splits=splits)
    chosen = {"do_image_splitting": splits} if layout == "idefics3" else {}
    expected = family.image_processor().preprocess(
        [[image]], do_normalize=False, do_rescale=False, return_tensors="pt", **chosen
    )
    frames = torch.stack([torch.from_numpy(np.array(frame)).permute(2, 0, 1) for frame in cut.frames])
    assert torch.equal(frames, expected["pixel_values"].reshape(frames.shape).to(torch.uint8))
    if splits != family.card.splits:
        return
    (seen,) = await read([given({"data": encoded(image)})], served)
    content = [{"type": "image", "text": ""}, {"type": "text", "text": "Look."}]
    turns = [{"role": "user", "content": content}]
    conversation = Conversation(turns, placeholder=cutting.placeholder, images=[seen.text])
    prompt = await encode_conversation(served, conversation)
    text = f"<|user|>\n{family.placeholder}Look.<|end|>\n<|assistant|>\n"
    assert prompt == family.processor(folder)(text=text, images=[[image]])["input_ids"][0]
    (shown,) = placed(prompt, [seen], served.card.images.token, "messages")
    rows = prompt[shown.first : shown.first + shown.tokens]
    assert (rows[0], rows[-1]) == (served.card.images.token,) * 2
    assert rows.count(served.card.images.token) == seen.rows == len(cut.frames) * FRAME_TOKENS
    assert len(shown.frames) == len(cut.frames) * 3 * FRAME**2


@pytest.mark.parametrize("size", [*SIZES, (600, 9), (9, 600)])
async def test_frame_of_any_sides_equals_transformers(
    models: Callable[[str], tuple[Path, ServedModel]], size: tuple[int, int]
) -> None:
    image, family, (folder, served) = picture(*size), FAMILIES["qwen2_5_vl"], models("qwen2_5_vl")
    cutting = layout_of(served)
    assert cutting is not None
    (frame,) = cutting.cut(image, served.card.images, splits=False).frames
    processor, raw = family.image_processor(), {"do_normalize": False, "do_rescale": False, "return_tensors": "pt"}
    ours, expected = processor.preprocess([frame], do_resize=False, **raw), processor.preprocess([image], **raw)
    assert torch.equal(ours["image_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(ours["pixel_values"], expected["pixel_values"])
    (seen,) = await read([given({"data": encoded(image)})], served)
    turns = [{"role": "user", "content": [{"type": "image", "text": ""}, {"type": "text", "text": "Look."}]}]
    prompt = await encode_conversation(served, Conversation(turns, placeholder=cutting.placeholder, images=[seen.text]))
    text = f"<|user|>\n{family.placeholder}Look.<|end|>\n<|assistant|>\n"
    assert prompt == family.inputs(folder, text, [image])["input_ids"][0].tolist()
    (shown,) = placed(prompt, [seen], served.card.images.token, "messages")
    assert (shown.columns, shown.tokens) == (frame.width // CELL, frame.width * frame.height // CELL**2)


async def test_image_with_too_different_sides_is_refused(
    models: Callable[[str], tuple[Path, ServedModel]],
) -> None:
    with pytest.raises(ApiError, match="its longer side is more than 200 times the other") as refused:
        await read([given({"data": encoded(picture(201, 1))})], models("qwen2_5_vl")[1])
    assert refused.value.param == "messages[0].content[1]"


def test_digests_of_images_tell_their_sides_apart() -> None:
    assert len({image_digest(bytes(48), columns) for columns in (0, 1, 2)}) == 3


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
    ("input_image", {"image_url": f"DATA:image/png;base64,{PNG}"}),
]


@pytest.mark.parametrize(("kind", "value"), FORMS)
async def test_image_in_every_form_is_read(kind: str, value: dict[str, Any], model: ServedModel) -> None:
    (seen,) = await read([given(value, kind)], model)
    (same,) = await read([given({"data": encoded(picture(40, 30))})], model)
    assert seen == same
    (low,) = await read([given({"detail": "low", "data": PNG})], model)
    assert (len(low.frames), low.digest == seen.digest) == (3 * FRAME**2, False)


def bomb() -> str:
    buffer = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation: int, *broken: tuple[int, int, int, bytes]) -> bytes:
    """EXIF data with an orientation and `broken` entries: tag, type, count, value."""
    entries = [(0x0112, 3, 1, struct.pack("<HH", orientation, 0)), *broken]
    packed = b"".join(struct.pack("<HHI", *entry[:3]) + entry[3] for entry in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_photograph_is_turned_upright(orientation: int, kind: str) -> None:
    data = saved(picture(40, 20), kind, exif=exif(orientation))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decoded(data, "f", LIMITS), expected.convert("RGB"))
    # A resolution that is a text: some programs write such, and Pillow cannot write it again.
    damaged = saved(picture(40, 20), kind, exif=exif(orientation, (0x011A, 2, 2, b"a\0\0\0")))
    assert np.array_equal(decoded(damaged, "f", LIMITS), expected.convert("RGB"))


GREY = np.arange(256, dtype=np.uint16).reshape(16, 16)
STILL, NEXT = Image.new("RGB", (9, 7), "red"), Image.new("RGB", (9, 7), "blue")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (saved(Image.fromarray(GREY * 257), "PNG"), Image.fromarray(GREY.astype(np.uint8)).convert("RGB")),
        *((saved(STILL.convert(mode), "PNG"), STILL) for mode in ("RGBA", "P")),
        *((saved(STILL.convert(mode), "PNG"), STILL.convert("L").convert("RGB")) for mode in ("L", "LA")),
        (saved(Image.new("1", (9, 7), 1), "PNG"), Image.new("RGB", (9, 7), "white")),
        (saved(Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG", quality=100), Image.new("RGB", (8, 8), "black")),
        *((saved(STILL, kind, save_all=True, append_images=[NEXT]), STILL) for kind in ("GIF", "PNG")),
        (saved(STILL, "WEBP", save_all=True, append_images=[NEXT], lossless=True), STILL),
    ],
)
def test_image_of_every_kind_is_read_in_rgb(data: bytes, expected: Image.Image) -> None:
    assert np.array_equal(decoded(data, "f", LIMITS), expected)


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    ({"data": "no base64!"}, "invalid_image", "no base64"),
    ({"data": base64.b64encode(b"text").decode()}, "invalid_image", "none of PNG, JPEG, WEBP, GIF"),
    ({"data": encoded(picture(9, 9), "BMP")}, "invalid_image", "none of PNG"),
    ({"data": PNG[: len(PNG) // 8 * 4]}, "invalid_image", "broken or cut off"),
    ({"data": ""}, "invalid_image", "none of PNG"),
    ({"data": base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()}, "invalid_image", "none of PNG"),
    ({"data": base64.b64encode(b"GIF89a").decode()}, "invalid_image", "none of PNG|broken or cut off"),
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
    value: dict[str, Any], code: str, message: str, model: ServedModel
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        await read([given(value)], model)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages[0].content[1]", code)


def test_decompression_bomb_is_refused() -> None:
    for limits in (LIMITS, ImageLimits(1, 10**9, 10**10)):
        with pytest.raises(ApiError, match="pixels"):
            decoded(base64.b64decode(bomb()), "f", limits)


async def test_too_many_images_are_refused(model: ServedModel) -> None:
    with pytest.raises(ApiError, match="at most 3 images, got 4"):
        await read([given({"data": PNG})] * 4, model)


async def test_images_that_fill_a_message_to_a_worker_are_refused(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.images.reader.MAX_FRAME_BYTES", 3 * 10 * FRAME**2)
    with pytest.raises(ApiError, match=r'"detail": "low"'):
        await read([given({"data": encoded(picture(84, 84))})] * 2, model)


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


async def test_prompt_with_other_places_than_images_is_refused(model: ServedModel) -> None:
    conversation = Conversation([{"role": "user", "content": "a"}], placeholder="<image>", images=["b"])
    with pytest.raises(ApiError, match="0 places for 1 images"):
        await encode_conversation(model, conversation)
    (seen,) = await read([given({"data": PNG})], model)
    with pytest.raises(ApiError, match=f"1 tokens of images; its images have {seen.rows}"):
        placed([5, model.card.images.token], [seen], model.card.images.token, "messages")


def test_card_of_an_unknown_layout_is_one_of_text(model: ServedModel) -> None:
    card = worker_pb2.ModelCard()
    card.CopyFrom(model.card)
    card.images.layout = "newer"
    assert layout_of(ServedModel(card, model.tokenizer, model.vocabulary, None)) is None


async def test_image_of_an_allowed_host_is_fetched(model: ServedModel) -> None:
    async with hosting() as host:
        host.answers["/a.png"] = http(body=base64.b64decode(PNG), content_type="image/png")
        host.answers["/moved"] = http("302 Found", location="/a.png")
        expected = await read([given({"data": PNG})], model)
        for path in ("/a.png", "/moved"):
            value = {"source": {"type": "url", "url": host.url(path)}}
            assert await read([given(value)], model, ImageFetcher(host.policy)) == expected
