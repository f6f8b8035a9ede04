"""Files in all three APIs: their text stands in the prompt; an unreadable one is a 400, or a note in a history."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import pytest

from services.gateway.files.reader import MAX_FILES
from tests.integration.gateway import fleet
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.test_chat_prompts import text_of


def pdf(contents: bytes, filters: str = "") -> bytes:
    """A PDF of one page, without the table of its objects, as some programs write it."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 144] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d %b >>\nstream\n%b\nendstream" % (len(contents), filters.encode(), contents),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    written = b"".join(b"%d 0 obj\n%b\nendobj\n" % (number + 1, one) for number, one in enumerate(objects))
    return b"%PDF-1.4\n" + written + b"trailer\n<< /Root 1 0 R >>\nstartxref\n0\n%%EOF"


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


PAGE = pdf(b"BT /F1 12 Tf 72 72 Td (Title: The blue heron) Tj ET")
SHOWN = "[File heron.pdf]\nTitle: The blue heron\n[End of file heron.pdf]"
URL = f"data:application/pdf;base64,{in_base64(PAGE)}"


def asked(data: str, name: str = "heron.pdf") -> list[tuple[str, dict[str, Any]]]:
    """A user's message with a file, in all APIs."""
    raw, media = data.rpartition(",")[2], data.removeprefix("data:").partition(";")[0]
    source = {"type": "base64", "media_type": media, "data": raw}
    return [
        ("chat/completions", {"messages": [{"role": "user", "content": [
            {"type": "file", "file": {"filename": name, "file_data": data}}]}]}),
        ("responses", {"input": [{"role": "user", "content": [
            {"type": "input_file", "filename": name, "file_data": data}]}]}),
        ("messages", {"max_tokens": 2, "messages": [{"role": "user", "content": [
            {"type": "document", "title": name, "source": source}]}]}),
    ]  # fmt: skip


def shown(stack: GatewayStack) -> str:
    return text_of(list(stack.workers[0].submits[-1].prompt_ids))


async def test_text_of_a_file_stands_in_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_LEN", 2048)
    async with running_stack([Worker("w0")]) as stack:
        for path, body in asked(URL):
            answer = await stack.http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            assert SHOWN in shown(stack), path
            assert "x-ryzanstein-ignored" not in answer.headers
        notes = f"data:text/plain;base64,{in_base64('Größe: 5'.encode())}"
        for path, body in asked(notes, "a\nb.txt"):
            assert (await stack.http.post(f"/v1/{path}", json=body)).status_code == 200
            assert "[File a b.txt]\nGröße: 5\n[End of file a b.txt]" in shown(stack), path
        counted = await stack.http.post("/v1/responses/input_tokens", json={"input": asked(URL)[1][1]["input"]})
        whole = await stack.http.post("/v1/responses", json=asked(URL)[1][1] | {"max_output_tokens": 1})
        assert counted.json()["input_tokens"] == whole.json()["usage"]["input_tokens"]


# Unpacked to 128 MiB of blanks; the number is that of a letter.
BOMB = pdf(zlib.compress(bytes(b" " * (1 << 27))), "/Filter /#46lateDecode")
UNREADABLE = [
    (f"data:application/pdf;base64,{in_base64(b'%PDF-1.4 and no more')}", "broken PDF"),
    (f"data:application/pdf;base64,{in_base64(pdf(b''))}", "PDF without text"),
    (f"data:application/pdf;base64,{in_base64(BOMB)}", "PDF"),
    (f"data:application/pdf;base64,{in_base64(b'no PDF')}", "it is no PDF"),
    (f"data:application/zip;base64,{in_base64(bytes(range(256)))}", "neither a PDF nor a text"),
    (f"data:text/plain;base64,{in_base64(b'a' + bytes(1))}", "neither a PDF nor a text"),
    ("data:text/plain;base64,?", "no base64"),
]


@pytest.mark.parametrize("case", range(len(UNREADABLE)))
async def test_unreadable_file_is_a_clear_400_and_a_note_in_a_history(case: int) -> None:
    """Each over one API, since their reading takes a process."""
    data, says = UNREADABLE[case]
    async with running_stack([Worker("w0")]) as stack:
        chat, *others = asked(data)
        path, body = [chat, *others][case % 3]
        answer = await stack.http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400, answer.text
        assert says in answer.json()["error"]["message"]
        assert "content" in answer.text
        assert not stack.workers[0].submits
        turns = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
        history = [*chat[1]["messages"], *turns]
        answer = await stack.http.post("/v1/chat/completions", json={"messages": history, "max_tokens": 1})
        assert answer.headers["x-ryzanstein-ignored"] == "messages[].content[].type=file"
        assert "[The file that stood here was left out: it cannot be read.]" in shown(stack)


async def test_files_elsewhere_and_too_many_files_are_refused() -> None:
    async with running_stack([Worker("w0")]) as stack:
        for part in ({"file_id": "file-1"}, {"file_url": "https://a.example/b.pdf"}):
            named = {"input": [{"role": "user", "content": [{"type": "input_file", **part}]}]}
            answer = await stack.http.post("/v1/responses", json=named)
            assert answer.status_code == 400
            assert "files are read where the request brings them" in answer.json()["error"]["message"]
        (path, body), *_ = asked("data:text/plain;base64,YQ==")
        body["messages"][0]["content"] *= MAX_FILES + 1
        answer = await stack.http.post(f"/v1/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_files")
