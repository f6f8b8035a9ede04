"""Forms with a file, which are read as they arrive: every wrong one is refused by name, and leaves nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import eventually, running_stack
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_bad_clients import raw, rest_of

LIMIT = 2000
BATCH = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="a.jsonl"', b"{}")
TYPE = {"content-type": "multipart/form-data; boundary=B"}


def form(*parts: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    return (
        b"".join(
            b"--B\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (name.encode(), value) for name, value in parts
        )
        + end
    )


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


REFUSED: list[tuple[bytes, dict[str, str], int, str | None, str]] = [
    (form(BATCH, *[FILE] * 2), {}, 400, "file", "more than one `file`"),
    (form(*[BATCH] * 17, FILE), {}, 400, None, "at most 16 parts"),
    (form(("name=\"purpose\"", b"x" * 1025), FILE), {}, 400, "purpose", "at most 1024 bytes"),
    (form(BATCH, FILE, end=b""), {}, 400, None, "not complete"),
    (b"--C\r\n", {}, 400, None, "cannot be read"),
    (form(BATCH, (FILE[0], b"x" * 100_000)), {}, 413, None, "bytes"),
    (form(BATCH, FILE), {"content-encoding": "gzip"}, 415, None, "compressed"),
    (form(BATCH, FILE), {"content-type": "multipart/form-data"}, 415, None, "boundary"),
]  # fmt: skip


async def test_wrong_form_is_rejected_and_leaves_no_data(server: RedisServer) -> None:
    limits = {"redis_url": server.url, "batch_file_bytes": LIMIT, "body_timeout_s": 1.0}
    async with running_stack([Worker("w0")], **limits) as stack:

        def nothing() -> bool:
            return not [key for key in server.client.keys("*file*") if key != b"rz:default:file-usage"]

        for content, headers, status, param, expected in REFUSED:
            for body in (content, pieces(content)):  # with the length declared, and without
                answer = await stack.http.post("/v1/files", content=body, headers=TYPE | headers)
                assert answer.status_code == status, (content[:200], answer.text)
                error = answer.json()["error"]
                assert (error["param"], expected in error["message"]) == (param, True), error
        head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: %b\r\ncontent-length: 500\r\n\r\n"
        begun = head % TYPE["content-type"].encode() + form(BATCH, FILE, end=b"")
        late = await rest_of(await raw(stack, begun))
        assert late.startswith(b"HTTP/1.1 408 "), late
        assert b"Nothing of the form arrived for 1 s." in late
        (await raw(stack, begun)).close()
        await eventually(nothing)
        stored = await stack.http.post("/v1/files", content=form(BATCH, FILE), headers=TYPE)
        assert (stored.status_code, stored.json()["bytes"]) == (httpx.codes.OK, 2)
        assert not nothing()
