"""Models that see on a pool of vLLM answer as in transformers, and their images are cached, told apart and refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from PIL import Image
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc, worker_pb2, worker_pb2_grpc
from safetensors.torch import load_file, save_file

from services.common.blockhash import ImageSpan, image_digest, wire_chain
from services.gateway.images.gemma3 import GEMMA3
from services.gateway.images.qwen2_5_vl import QWEN2_5_VL
from tests.seeing_model import FAMILIES, FRAME_TOKENS, picture, question
from tests.stack import RunningStack, running_stack
from tests.vllm.installation import PYTHON, START_S

pytestmark = pytest.mark.timeout(3 * START_S)
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}  # vLLM's kernels for CPUs take no smaller heads
LARGE, SMALL, OTHER = picture(200, 120, 1), picture(20, 20, 2), picture(200, 120, 9)
TEXT = "What is on both?"
N_TOKENS = 16
BLOCK = 32  # tokens
LAYOUTS = {"gemma3": GEMMA3, "qwen2_5_vl": QWEN2_5_VL}


@dataclass(frozen=True)
class ServedPictures:
    stack: RunningStack
    prompt: list[int]  # transformers', of both pictures and the text
    answer: list[int]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.stack.url}/v1/{path}", json={"model": "sees", **body}, timeout=START_S)

    def ask(self, *images: Image.Image, **more: Any) -> dict[str, Any]:
        """An answer to a chat, with its tokens."""
        options = {"max_tokens": N_TOKENS, "temperature": 0, "return_token_ids": True, **more}
        answer = self.post("chat/completions", question("chat/completions", list(images), TEXT, **options))
        assert answer.status_code == httpx.codes.OK, answer.text
        decoded: dict[str, Any] = answer.json()
        return decoded


@pytest.fixture(scope="module", params=LAYOUTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPictures]:
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    model = family.write(folder, **SHAPE)
    as_published(folder)
    text = f"<|endoftext|><|user|>\n{family.placeholder * 2}{TEXT}<|end|>\n<|assistant|>\n"
    prompt, answer = family.reference_answer(model, folder, text, [LARGE, SMALL], N_TOKENS, causal=True)  # vLLM on CPUs
    arguments = ("enforce_eager=true", f"block_size={BLOCK}", 'limit_mm_per_prompt={"image": 2, "video": 0}')
    engine = ("--engine=vllm", f"--engine-python={PYTHON}", *(f"--engine-arg={argument}" for argument in arguments))
    sizes = ("--dtype=float32", "--max-model-len=1024", "--kv-tokens=8192", f"--start-timeout={START_S}")
    options = (*engine, *sizes, "--served-model-name=sees")
    with running_stack(tmp_path_factory.mktemp("run"), *options, model=str(folder), start_s=START_S) as stack:
        yield ServedPictures(stack, prompt, answer)


def as_published(folder: Path) -> None:
    """Write what transformers leaves out or names in another way: a frame's tokens, and SigLIP's tensors."""
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_length": FRAME_TOKENS}))
    file, old, new = folder / "model.safetensors", "vision_tower.", "vision_tower.vision_model."
    save_file({name.replace(old, new): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def test_tokens_equal_transformers_and_prefixes_know_their_images(served: ServedPictures) -> None:
    first, again, other = (served.ask(image, SMALL) for image in (LARGE, LARGE, OTHER))
    for answer in (first, again):
        assert answer["choices"][0]["token_ids"] == served.answer
        assert answer["usage"]["prompt_tokens"] == len(served.prompt)
    assert other["choices"][0]["token_ids"] != served.answer
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again, other)]
    assert cached == [0, (len(served.prompt) - 1) // BLOCK * BLOCK, 0]


def test_coordinator_names_prefixes_with_images_as_gateways_do(served: ServedPictures) -> None:
    served.ask(LARGE, SMALL)
    (worker,) = served.stack.workers()
    with grpc.insecure_channel(worker.address) as channel:
        card = worker_pb2_grpc.WorkerStub(channel).GetModelCard(worker_pb2.GetModelCardRequest(), timeout=60)
    takes, spans, end = card.images, [], 0
    for image in (LARGE, SMALL):
        (frame,) = LAYOUTS[takes.layout].cut(image, takes, splits=False).frames
        n_rows = frame.width * frame.height // takes.cell**2 if takes.cell else takes.frame_tokens
        first = served.prompt.index(takes.token, end)
        end = first + n_rows
        columns = frame.width // takes.cell if takes.cell else 0
        spans.append(ImageSpan(first, end, image_digest(frame.tobytes(), columns)))
    chain = wire_chain(card.hash_root, "", served.prompt, spans)
    query = routing_pb2.RouteRequest(model="sees", block_hashes=chain, prompt_tokens=len(served.prompt))
    deadline = time.monotonic() + START_S
    with grpc.insecure_channel(served.stack.state["router"]) as channel:
        explain = routing_pb2_grpc.RouterStub(channel).Explain
        while explain(query, timeout=60).candidates[0].matched_tokens != len(served.prompt) // BLOCK * BLOCK:
            assert time.monotonic() < deadline, explain(query, timeout=60)
            time.sleep(0.1)


def test_more_images_than_vllm_s_limit_and_videos_are_refused_by_name(served: ServedPictures) -> None:
    many = served.post("chat/completions", question("chat/completions", [SMALL] * 3, TEXT))
    assert (many.status_code, many.json()["error"]["param"]) == (400, "images")
    assert "limit_mm_per_prompt is 2" in many.json()["error"]["message"]
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}
    clip = served.post("chat/completions", {"messages": [{"role": "user", "content": [video]}]})
    assert (clip.status_code, clip.json()["error"]["param"]) == (400, "messages[0].content[0].type")
