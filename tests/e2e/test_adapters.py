"""LoRA adapters through the API of a whole installation: what goes wrong with them elsewhere does not here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import httpx
import pytest
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from services.cli.stack.default_model import TINY_MODEL
from tests.adapters import write_adapter
from tests.stack import RunningStack, running_stack

BASE = TINY_MODEL.name
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return " * 3  # several blocks of KV
MODULES = {"q_proj": 4, "v_proj": 4, "o_proj": 4, "up_proj": 4}
MORE = [f"more {number}" for number in range(4)]
OK = httpx.codes.OK


class AdapterInstallation:
    """Two workers with the adapter `fixed`, and a folder of others."""

    def __init__(self, stack: RunningStack, folder: Path) -> None:
        self.stack, self.folder = stack, folder

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.stack.url}/v1/{path}", json=body, timeout=120)

    def ask(self, model: str, n: int = 24, **more: Any) -> httpx.Response:
        return self.post("completions", model=model, prompt=PROMPT, max_tokens=n, temperature=0, **more)

    def text(self, model: str, **more: Any) -> str:
        answer = self.ask(model, **more)
        assert answer.status_code == OK, answer.text
        return str(answer.json()["choices"][0]["text"])

    def load(self, name: str, folder: str, **more: Any) -> httpx.Response:
        return self.post("load_lora_adapter", lora_name=name, lora_path=str(self.folder / folder), **more)

    def stream(self, model: str, n: int) -> str:
        """The text of a stream; fails if it does not come to its end."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": n, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{self.stack.url}/v1/completions", json=body, timeout=120) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert lines[-1] == "[DONE]", lines
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    def resident(self, name: str, slots_of: int = 0) -> set[str]:
        """The workers that have the adapter in a slot, by the router's word, once there are `slots_of`."""
        deadline = time.monotonic() + 180
        while True:
            views = self.stack.workers()
            actual = {v.worker_id for v in views if any(a.name == name and a.in_slot for a in v.state.adapters)}
            if len(actual) >= slots_of or time.monotonic() > deadline:
                return actual
            time.sleep(0.02)

    def listed(self) -> dict[str, dict[str, Any]]:
        return {model["id"]: model for model in httpx.get(f"{self.stack.url}/v1/models", timeout=120).json()["data"]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterInstallation]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("fixed", "one", "two", *MORE)):
        write_adapter(TINY_MODEL, folder / name, MODULES, seed=seed)
    options = ("--workers", "2", "--adapter", f"fixed={folder / 'fixed'}", "--adapter-source", str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RYZANSTEIN_ADAPTER_SLOTS", "3")  # fewer than there are adapters
        with running_stack(tmp_path_factory.mktemp("run"), *options) as stack:
            stack.wait_serving(2)
            yield AdapterInstallation(stack, folder)


def test_an_adapter_is_a_model_with_answers_of_its_own(served: AdapterInstallation) -> None:
    assert served.load("one", "one").status_code == OK
    texts = {name: served.text(name) for name in (BASE, "fixed", "one")}
    assert len(set(texts.values())) == 3, texts
    assert texts == {name: served.text(name) for name in texts}
    listed = served.listed()
    assert {name: listed[name].get("parent") for name in texts} == {BASE: None, "fixed": BASE, "one": BASE}
    assert listed["one"]["root"] == str(served.folder / "one")
    assert served.load("one", "two").status_code == httpx.codes.BAD_REQUEST  # the name is taken
    assert served.load(BASE, "two", load_inplace=True).status_code == httpx.codes.BAD_REQUEST


def test_routers_know_the_workers_of_an_adapter_and_its_load_cost_elsewhere(served: AdapterInstallation) -> None:
    write_adapter(TINY_MODEL, served.folder / "near", MODULES, seed=30)
    assert served.load("near", "near").status_code == OK
    served.text("near", n=1)
    (holder,) = served.resident("near", 1)
    digest = next(a.digest for view in served.stack.workers() for a in view.state.adapters if a.name == "near")
    with grpc.insecure_channel(served.stack.state["router"]) as channel:
        request = routing_pb2.RouteRequest(request_id="r", prompt_tokens=9, max_tokens=1, adapter=digest)
        decision = routing_pb2_grpc.RouterStub(channel).Explain(request, timeout=60)
    loads = {candidate.worker_id: candidate.adapter_ms for candidate in decision.candidates}
    assert loads.pop(holder) == 0
    assert min(loads.values()) > 0


def test_pinned_adapter_is_loaded_on_every_worker_in_advance_and_never_evicted(served: AdapterInstallation) -> None:
    assert served.load("pinned", "two", pinned=True).status_code == OK
    assert len(served.resident("pinned", 2)) == 2
    assert served.load("second", "one", pinned=True).status_code == OK
    third = served.load("third", "fixed", pinned=True)
    assert third.status_code == httpx.codes.BAD_REQUEST
    assert third.json()["error"]["param"] == "pinned"
    assert "3 slots for adapters, one of which stays for others; pinned are pinned, second" in third.text
    for name in MORE:
        assert served.load(name, name).status_code == OK
        served.text(name, n=1)
    assert len(served.resident("pinned")) == 2
    for name in ("pinned", "second"):
        assert served.post("unload_lora_adapter", lora_name=name).status_code == OK


def test_loads_and_unloads_break_no_stream_and_change_no_byte(served: AdapterInstallation) -> None:
    """Two hundred, while the base and another adapter stream; slots are few, so that adapters evict each other."""
    whole = {model: served.stream(model, 60) for model in (BASE, "fixed")}
    texts, over = list[tuple[str, str]](), Event()

    def stream(model: str) -> None:
        while not over.is_set():
            texts.append((model, served.stream(model, 60)))

    def churn(name: str) -> None:
        for turn in range(50):
            assert served.load(name, MORE[turn % len(MORE)]).status_code == OK
            if not turn % 5:
                served.text(name, n=1)
            assert served.post("unload_lora_adapter", lora_name=name).status_code == OK

    with ThreadPoolExecutor() as threads:
        streams = [threads.submit(stream, model) for model in whole]
        try:
            list(threads.map(churn, ("a", "b", "c", "d")))
        finally:
            over.set()
        for running in streams:
            running.result()
    assert {model for model, _ in texts} == set(whole)
    assert [text for model, text in texts if text != whole[model]] == []


def test_reloaded_adapter_shares_no_kv_with_its_previous_version(served: AdapterInstallation) -> None:
    assert served.load("again", "one").status_code == OK
    before, _ = served.text("again"), served.text("again")  # the prompt is cached
    expected = served.text("two") if served.load("two", "two").status_code == OK else ""
    assert served.load("again", "two", load_inplace=True).status_code == OK
    assert served.text("again") == expected != before


def test_inapplicable_adapter_is_rejected_without_falling_back_to_the_base_model(served: AdapterInstallation) -> None:
    assert served.ask("nobody").status_code == httpx.codes.NOT_FOUND
    write_adapter(TINY_MODEL, served.folder / "other", {"embed_tokens": 4})
    refused = served.load("other", "other")
    assert refused.status_code == httpx.codes.BAD_REQUEST
    assert "embed_tokens" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "lora_path"
    outside = served.post("load_lora_adapter", lora_name="other", lora_path=str(served.folder / ".." / "elsewhere"))
    assert "adapters are loaded from these folders only" in outside.json()["error"]["message"]
    assert served.ask("other").status_code == httpx.codes.NOT_FOUND


@pytest.mark.parametrize("stream", [False, True])
def test_overflowing_adapter_ends_its_requests_alone(served: AdapterInstallation, stream: bool) -> None:
    write_adapter(TINY_MODEL, served.folder / "huge", MODULES, size=1e25)
    assert served.load("huge", "huge", load_inplace=True).status_code == OK
    expected = served.text(BASE)
    with ThreadPoolExecutor() as pool:
        neighbours = [pool.submit(served.text, BASE) for _ in range(3)]
        answers = [
            pool.submit(served.ask, "huge", stream=stream, **more) for more in ({}, {"logprobs": 1}, {"top_p": 0.5})
        ]
        assert {one.result() for one in neighbours} == {expected}
    for answer in answers:
        message = "adapter 'huge': the model computes infinite numbers or NaN for this text"
        if stream:
            assert message in answer.result().text
        else:
            assert answer.result().status_code == httpx.codes.BAD_REQUEST
            assert answer.result().json()["error"]["param"] == "model"
            assert message in answer.result().json()["error"]["message"]
    assert served.text(BASE) == expected
    assert served.post("unload_lora_adapter", lora_name="huge").status_code == OK


def test_an_adapter_holds_on_every_worker_and_a_stream_survives_the_death_of_its_worker(
    served: AdapterInstallation,
) -> None:
    """The worker that starts again has never heard of the adapter."""
    assert served.load("everywhere", "one").status_code == OK
    whole = served.text("everywhere", n=200)
    texts = {served.text("everywhere", n=200, user=f"session-{index}") for index in range(4)}
    assert texts == {whole}
    url = f"{served.stack.url}/v1/completions"
    body = {"model": "everywhere", "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_workers": True}}
    text, workers = "", list[str]()
    with httpx.stream("POST", url, json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                if "worker" in choice:
                    workers.append(choice["worker"]["id"])
                    if len(workers) == 1:
                        os.kill(served.stack.rank_pids(workers[0])[0], signal.SIGKILL)
    assert text == whole
    assert len(workers) == 2
    assert served.text("everywhere", n=200, user="after") == whole


def test_grammars_and_batches_of_choices_keep_the_adapter(served: AdapterInstallation) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "bb", "ccc"]}}}
    sent = {"messages": [{"role": "user", "content": "choose"}], "max_tokens": 20, "response_format": schema}
    answer = served.post("chat/completions", model="fixed", n=2, **sent)
    assert answer.status_code == OK, answer.text
    assert answer.json()["model"] == "fixed"
    assert {choice["message"]["content"] for choice in answer.json()["choices"]} <= {'"a"', '"bb"', '"ccc"'}


def test_a_changed_file_or_an_unloaded_name_is_an_error_not_another_answer(served: AdapterInstallation) -> None:
    shutil.copytree(served.folder / "two", served.folder / "gone")
    write_adapter(TINY_MODEL, served.folder / "gone", MODULES, seed=9)
    assert served.load("gone", "gone").status_code == OK
    write_adapter(TINY_MODEL, served.folder / "gone", MODULES, seed=10)  # before the first request with it
    changed = served.ask("gone")
    assert changed.status_code == httpx.codes.BAD_REQUEST
    assert "holds another adapter" in changed.json()["error"]["message"]
    assert served.post("unload_lora_adapter", lora_name="gone").status_code == OK
    assert served.ask("gone").status_code == httpx.codes.NOT_FOUND
    assert served.post("unload_lora_adapter", lora_name="gone").status_code == httpx.codes.NOT_FOUND
    assert served.post("unload_lora_adapter", lora_name="fixed").status_code == httpx.codes.BAD_REQUEST
    assert "gone" not in served.listed()
