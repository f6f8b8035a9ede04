"""Images in all three APIs, in messages and in tools' results: the same prompt, frames and digests for workers."""

from __future__ import annotations

import base64
from hashlib import sha256
from typing import Any

import pytest
from ryzanstein.v1 import worker_pb2
from tokenizers import AddedToken, Tokenizer

from services.common.blockhash import ImageSpan, wire_chain
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.seeing_model import FAMILIES, FRAME, encoded, picture
from tests.unit.gateway.made_tokenizers import byte_level

ROWS = 5  # rows of a frame
# Shows images of users alone, as some templates do; other roles get a text in their place.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' and m.role == 'user' %}<image>{% elif p.type == 'text' %}"
    "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
PNG = encoded(picture(20, 20))
URL = f"data:image/png;base64,{PNG}"


def seeing(layout: str = "idefics3") -> Worker:
    family = FAMILIES[layout]
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (family.row, *family.special)])
    takes = worker_pb2.ImageInput(
        layout=layout, token=tokenizer.token_to_id(family.row), splits=family.card.splits, resample=family.resample
    )
    if layout == "qwen2_5_vl":
        takes.cell, takes.frame_tokens, takes.least_pixels, takes.most_pixels = 10, 9, 100, 900
    else:
        takes.frame_tokens, takes.frame_size, takes.longest_edge = ROWS, FRAME, FRAME
    template = TEMPLATE.replace("<image>", family.placeholder)
    return Worker("w0", tokenizer=tokenizer, template=template, abilities=worker_pb2.ModelCard(images=takes))


IMAGES = {
    "idefics3": "<fake_token_around_image><global-img>" + "<image>" * ROWS + "<fake_token_around_image>",
    "gemma3": "\n\n<start_of_image>" + "<image_soft_token>" * ROWS + "<end_of_image>\n\n",
    "qwen2_5_vl": "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>",
}


def expected(worker: Worker, text: str) -> list[int]:
    """The ids of a prompt with the text of every image."""
    assert worker.tokenizer is not None
    image = IMAGES[worker.abilities.images.layout]
    return list(worker.tokenizer.encode(text.replace("<image>", image), add_special_tokens=False).ids)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT_PART = {"type": "image_url", "image_url": {"url": URL}}
INPUT_PART = {"type": "input_image", "image_url": URL}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": [{"role": "user", "content": ["See: ", CHAT_PART, " there"]}]}),
    (
        "responses",
        {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "See: "}, INPUT_PART, {"type": "input_text", "text": " there"}]}]},
    ),
    (
        "messages",
        {"max_tokens": 2, "messages": [{"role": "user", "content": [
            {"type": "text", "text": "See: "}, BLOCK, {"type": "text", "text": " there"}]}]},
    ),
]  # fmt: skip
RESULTS: list[tuple[str, dict[str, Any]]] = [
    (
        "chat/completions",
        {"messages": [
            {"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, CHAT_PART]}]},
    ),
    (
        "responses",
        {"input": [
            {"role": "user", "content": "Look."},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1",
             "output": [{"type": "input_text", "text": "a"}, INPUT_PART]}]},
    ),
    (
        "messages",
        {"max_tokens": 2, "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a"}, BLOCK]}]}]},
    ),
]  # fmt: skip


async def submitted(stack: GatewayStack, path: str, body: dict[str, Any]) -> worker_pb2.Submit:
    answer = await stack.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-ryzanstein-ignored" not in answer.headers
    return stack.workers[0].submits[-1]


@pytest.mark.parametrize("layout", IMAGES)
async def test_images_of_all_apis_reach_the_worker_alike(layout: str) -> None:
    async with running_stack([seeing(layout)]) as stack:
        worker = stack.workers[0]
        for path, body in BODIES:
            submit = await submitted(stack, path, body)
            assert list(submit.prompt_ids) == expected(worker, turn("user", "See: <image> there")), path
            (image,) = submit.images
            span = submit.prompt_ids[image.first : image.first + image.tokens]
            n_rows, side, columns = (4, 20, 2) if layout == "qwen2_5_vl" else (ROWS, FRAME, 0)
            assert (len(span), list(span).count(worker.abilities.images.token)) == (n_rows, n_rows)
            shape = columns.to_bytes(4, "little") if columns else b""
            assert (image.columns, image.digest) == (columns, sha256(image.frames + shape).digest())
            assert len(image.frames) == 3 * side**2
            spans = [ImageSpan(image.first, image.first + image.tokens, image.digest)]
            ids = list(submit.prompt_ids)
            assert list(stack.router.routes[-1].block_hashes) == wire_chain("test-model-root", "", ids, spans)
            assert wire_chain("test-model-root", "", ids) != wire_chain("test-model-root", "", ids, spans)
        for path, body in RESULTS:
            submit = await submitted(stack, path, body)
            tail = "<tool_response>\na\n<image>\n</tool_response>"
            assert list(submit.prompt_ids)[-len(expected(worker, turn("user", tail))) :] == expected(
                worker, turn("user", tail)
            ), path
            assert len(submit.images) == 1


async def test_spelled_placeholders_are_text_and_images_are_counted() -> None:
    async with running_stack([seeing()]) as stack:
        worker = stack.workers[0]
        spelled = ["an <image> and <global-img> ", CHAT_PART]
        body = {"messages": [{"role": "user", "content": spelled}]}
        submit = await submitted(stack, "chat/completions", body)
        assert list(submit.prompt_ids).count(worker.abilities.images.token) == ROWS
        counted = await stack.http.post("/tokenize", json=body)
        assert counted.json()["tokens"] == list(submit.prompt_ids)
        two = [{"type": "text", "text": "a"}, BLOCK, BLOCK]
        request = {"messages": [{"role": "user", "content": two}]}
        count = await stack.http.post("/v1/messages/count_tokens", json=request)
        assert count.json()["input_tokens"] == len(expected(worker, turn("user", "a<image><image>")))
        many = {"messages": [{"role": "user", "content": [CHAT_PART] * 33}]}
        refused = await stack.http.post("/v1/chat/completions", json=many)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            400,
            "too_many_images",
            "messages[0].content[32]",
        )


BROKEN = base64.b64encode(b"no image").decode()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c"}}]}]},
            "messages[0].content[0]",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
            "input[].content[]",
        ),
        (
            "messages",
            {
                "max_tokens": 2,
                "messages": [
                    {"role": "user", "content": [BLOCK | {"source": {"type": "base64", "data": BROKEN}}]},
                ],
            },
            "messages[0].content[0]",
        ),
    ],
)
async def test_unreadable_image_is_a_clear_400(path: str, body: dict[str, Any], param: str) -> None:
    async with running_stack([seeing()]) as stack:
        answer = await stack.http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400, answer.text
        assert param in answer.text
        assert not stack.workers[0].submits
