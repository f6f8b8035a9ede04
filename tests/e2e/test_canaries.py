"""Canaries of real checkpoints: a wrongly quantized model is rolled back, the same one without the fault promoted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.cli.stack.default_model import TINY_MODEL
from services.common.ports import free_port
from services.tools.quantizer.run import QuantizationOptions, quantize
from tests.stack import RunningStack, running_stack

TOKEN = "c0ffee" * 8
TEXTS = [json.loads(line)["text"][:200] for line in (TINY_MODEL / "heldout.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model, its 8-bit form, and that form with the scales of 7-bit codes, which are twice as large."""
    folder = tmp_path_factory.mktemp("models")
    paths = {name: folder / name for name in ("base", "right", "wrong")}
    shutil.copytree(TINY_MODEL, paths["base"])
    options = QuantizationOptions(paths["base"], paths["right"], "rtn", 8, None, 0.0, True, None, 6, 48)
    quantize(options, torch.device("cpu"), lambda *_: None)
    shutil.copytree(paths["right"], paths["wrong"])
    n_scales = 0
    for file in paths["wrong"].glob("*.safetensors"):
        tensors = load_file(file)
        scales = {name: 2 * tensor for name, tensor in tensors.items() if name.endswith(".weight_scale")}
        n_scales += len(scales)
        save_file(tensors | scales, file, {"format": "pt"})
    assert n_scales >= 4 * 7, "each layer's projections"
    return paths


@pytest.fixture(scope="module")
def stack(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder, port = tmp_path_factory.mktemp("run"), free_port()
    token = folder / "admin-token"
    token.touch(0o600)
    token.write_text(TOKEN)
    options = (part for path in list(models.values())[1:] for part in ("--model", str(path)))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RYZANSTEIN_ADMIN_PORT", str(port))
        environment.setenv("RYZANSTEIN_ADMIN_URL", f"http://127.0.0.1:{port}")
        environment.setenv("RYZANSTEIN_ADMIN_TOKEN_FILE", str(token))
        with running_stack(folder, *options, "--tensor-parallel", "1", model=str(models["base"])) as running:
            running.wait_serving(len(models))
            ran(running, "routes", "set", "chat", "--target", "base")
            yield running


def ran(stack: RunningStack, *arguments: str) -> str:
    """The output of a command."""
    done = stack.ryzanstein(*arguments)
    assert done.returncode == 0, done
    return done.stdout


def ask(stack: RunningStack, text: str) -> str:
    """The model that answers a greedy request for the route."""
    body = {"model": "chat", "prompt": text, "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=300).raise_for_status()
    return answer.headers["x-ryzanstein-target"]


def canary(stack: RunningStack) -> dict[str, Any]:
    """The route's canary."""
    (state,) = json.loads(ran(stack, "canary", "status", "--json"))
    return dict(state)


def until_over(stack: RunningStack) -> tuple[dict[str, Any], set[str]]:
    """The canary after its end, under load, and the models that answered meanwhile."""
    answered, texts = set(), cycle(TEXTS)
    while True:
        answered |= {ask(stack, next(texts)) for _ in range(10)}
        state = canary(stack)
        if state["state"] != "running":
            return state, answered


@pytest.mark.timeout(300)
def test_wrongly_quantized_model_is_rolled_back_within_200_mirrored_requests(stack: RunningStack) -> None:
    ran(stack, "canary", "start", "chat", "wrong", "--share", "100%")
    state, answered = until_over(stack)
    assert (state["state"], state["step"]) == ("rolled_back", 0), state
    assert state["reason"].startswith("greedy answers differ after"), state
    assert state["tally"]["sequences"] <= 200
    assert answered == {"base"}, "no client gets the wrong model"
    (route,) = json.loads(ran(stack, "routes", "list", "--json"))
    assert ([target["model"] for target in route["route"]["targets"]], route["route"]["mirror"]) == (["base"], None)


@pytest.mark.timeout(300)
def test_rightly_quantized_model_is_promoted(stack: RunningStack) -> None:
    ran(stack, "canary", "start", "chat", "right", "--share", "100%", "--sequences", "20")
    state, answered = until_over(stack)
    assert (state["state"], state["weight"]) == ("promoted", 1), state
    assert answered == {"base", "right"}, "the steps divide the requests"
    while ask(stack, TEXTS[0]) != "right":
        pass
