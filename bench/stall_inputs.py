"""The worst input that may be sent, by kind. As a process it sends one kind in a loop and prints the statuses.

python -m bench.stall_inputs KIND REST_PORT GRPC_PORT
"""

from __future__ import annotations

import http.client
import sys
from collections.abc import Callable, Iterator

import grpc
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc
from websockets.sync.client import connect

from bench.gateway_mocks import MODEL

_BYTES = 15_000_000  # bodies may have 16 MiB
_CONTEXT = 2048  # of the bundled model

PACE_US = 20_000  # of the streams beside; what an attacker asks for as its seed, too: mocks take that for a pace

Send = Callable[[int, int], Iterator[str]]


def _body(field: str, value: bytes, more: bytes = b"") -> bytes:
    return b'{"model": "%b", "max_tokens": 1, "seed": %d, "%b": %b%b}' % (
        MODEL.encode(),
        PACE_US,
        field.encode(),
        value,
        more,
    )


def _bare(field: str, value: bytes) -> bytes:
    return b'{"model": "%b", "%b": %b}' % (MODEL.encode(), field.encode(), value)


def _times(item: bytes, size: int = _BYTES) -> bytes:
    """A list of that many bytes."""
    return b"[" + (item + b",") * (size // (len(item) + 1)) + item + b"]"


def _text(size: int) -> bytes:
    return b'"' + b"x " * (size // 2) + b'"'


def _chat(content: bytes) -> bytes:
    return b'[{"role": "user", "content": %b}]' % content


_FITTING = b'"' + b"x " * (_CONTEXT // 2 - 32) + b'"'  # two tokens for each
_FITTING_IDS = b"[" + b"50," * (_CONTEXT - 2) + b"50]"


def _post(path: str, body: Callable[[], bytes]) -> Send:
    def send(rest: int, _: int) -> Iterator[str]:
        connection, data = http.client.HTTPConnection("127.0.0.1", rest), body()
        while True:
            connection.request("POST", path, data)
            answer = connection.getresponse()
            answer.read()
            yield str(answer.status)

    return send


def _over_websocket(body: Callable[[], bytes]) -> Send:
    def send(rest: int, _: int) -> Iterator[str]:
        message = b'{"type": "start", "id": "a", "kind": "completion", "request": %b}' % body()
        with connect(f"ws://127.0.0.1:{rest}/v1/stream", compression=None) as socket:
            while True:
                socket.send(message, text=True)
                socket.recv()
                yield "error"

    return send


def _over_grpc(make: Callable[[], inference_pb2.GenerateRequest]) -> Send:
    def send(_: int, port: int) -> Iterator[str]:
        options = [("grpc.max_send_message_length", -1)]
        stub, request = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(f"127.0.0.1:{port}", options)), make()
        while True:
            try:
                yield str(len(list(stub.Generate(request))))
            except grpc.RpcError as error:
                yield error.code().name

    return send


INPUTS: dict[str, Send] = {
    "4 MB of text": _post("/v1/completions", lambda: _body("prompt", _text(4_000_000))),
    "15 MB of text": _post("/v1/completions", lambda: _body("prompt", _text(_BYTES))),
    "15 MB of token ids": _post("/v1/completions", lambda: _body("prompt", _times(b"50"))),
    "15 MB of lists of ids": _post("/v1/completions", lambda: _body("prompt", _times(b"[50]"))),
    "400,000 lists of ids": _post("/v1/completions", lambda: _body("prompt", _times(b"[50]", 1_990_000))),
    "a text that fits": _post("/v1/completions", lambda: _body("prompt", _FITTING)),
    "128 texts that fit": _post("/v1/completions", lambda: _body("prompt", _times(_FITTING, 127 * len(_FITTING)))),
    "128 lists that fit": _post(
        "/v1/completions", lambda: _body("prompt", _times(_FITTING_IDS, 127 * len(_FITTING_IDS)))
    ),
    "a chat of 15 MB": _post("/v1/chat/completions", lambda: _body("messages", _chat(_text(_BYTES)))),
    "15 MB of messages": _post(
        "/v1/chat/completions", lambda: _body("messages", _times(b'{"role": "user", "content": "x"}'))
    ),
    "2,000 messages": _post(
        "/v1/chat/completions", lambda: _body("messages", _times(b'{"role": "user", "content": "x"}', 66_000))
    ),
    "15 MB of template variables": _post(
        "/v1/chat/completions",
        lambda: _body("messages", _chat(b'"x"'), b', "chat_template_kwargs": {"a": %b}' % _times(b"[1]")),
    ),
    "1 million biases": _post(
        "/v1/completions",
        lambda: _body(
            "prompt", b'"x"', b', "logit_bias": {%b}' % b",".join(b'"%d": 1' % token for token in range(1_000_000))
        ),
    ),
    "200 texts to embed": _post("/v1/embeddings", lambda: _bare("input", _times(_FITTING, 199 * (len(_FITTING) + 1)))),
    "15 MB to tokenize": _post("/tokenize", lambda: _bare("prompt", _text(_BYTES))),
    "what fits to tokenize": _post("/tokenize", lambda: _bare("prompt", _FITTING)),
    "15 MB to detokenize": _post("/detokenize", lambda: _bare("tokens", _times(b"50"))),
    "15 MB over WebSocket": _over_websocket(lambda: _body("prompt", _text(_BYTES))),
    "15 MB over gRPC": _over_grpc(lambda: inference_pb2.GenerateRequest(model=MODEL, prompt="x " * (_BYTES // 2))),
    "3 million ids over gRPC": _over_grpc(
        lambda: inference_pb2.GenerateRequest(model=MODEL, prompt_ids=inference_pb2.TokenIds(ids=[50] * 3_000_000))
    ),
}


def main() -> None:
    """Send until killed."""
    kind, rest, grpc_port = sys.argv[1:]
    for status in INPUTS[kind](int(rest), int(grpc_port)):
        print(status, flush=True)


if __name__ == "__main__":
    main()
