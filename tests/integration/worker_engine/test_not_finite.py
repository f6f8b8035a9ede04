"""A model whose numbers overflow ends its requests with an error, and the engine serves the next ones."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
import pytest_asyncio
from ryzanstein.v1 import worker_pb2 as pb
from safetensors.torch import load_file, save_file

from services.worker.engine.base import Engine
from services.worker.engine.errors import GenerationError
from services.worker.engine.output import MODEL, Finish
from services.worker.engine.request import EngineRequest
from services.worker.native.offline import open_offline
from services.worker.native.opening import open_native
from tests.integration.worker_engine.answers import PROMPT, complete
from tests.integration.worker_engine.engines import SETTINGS, serving
from tests.models import BUNDLED_MODEL
from tests.unit.worker.engine.stand_ins import NoObserver

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of finite numbers whose last norm exceeds float32."""
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path_factory.mktemp("overflowing") / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def logged() -> Iterator[SimpleQueue[logging.LogRecord]]:
    """Logs of workers, from before the engine starts."""
    records, logger = SimpleQueue[logging.LogRecord](), logging.getLogger("services.worker")
    handler = logging.handlers.QueueHandler(records)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(overflowing: Path, logged: SimpleQueue[logging.LogRecord]) -> AsyncGenerator[Engine, None]:
    settings = SETTINGS.model_copy(update={"model": str(overflowing)})
    async with serving(await open_native(settings, overflowing, NoObserver(), NoObserver())) as running:
        yield running


async def test_start_up_probe_logs_that_numbers_are_not_finite(
    engine: Engine, logged: SimpleQueue[logging.LogRecord]
) -> None:
    message = ""
    while not message.startswith("the start-up probe failed: the model computes infinite numbers"):
        message = (await asyncio.to_thread(logged.get, timeout=60)).getMessage()


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"grammar": "%llguidance {}\nstart: /[a-z]+/"},
        {"repetition_penalty": 1.2},
    ],
    ids=lambda sampling: "-".join(sampling) or "plain",
)
async def test_request_fails_when_logits_are_not_finite(engine: Engine, sampling: dict[str, object]) -> None:
    answer = await complete(engine, EngineRequest("r", PROMPT, pb.Sampling(max_tokens=1, **sampling)))
    assert (answer.finish, answer.ids) == (Finish.FAILED, [])
    assert "infinite numbers or NaN" in answer.outputs[-1].failure
    assert answer.outputs[-1].failed_field == MODEL


async def test_embedding_request_fails_when_numbers_are_not_finite(engine: Engine) -> None:
    answer = await complete(engine, EngineRequest("r", PROMPT, pb.Sampling(), embed=True))
    assert (answer.finish, answer.outputs[-1].embedding) == (Finish.FAILED, ())


async def test_offline_generation_raises_when_logits_are_not_finite(overflowing: Path) -> None:
    async with open_offline(SETTINGS.model_copy(update={"model": str(overflowing)})) as engine:
        with pytest.raises(GenerationError, match="infinite numbers or NaN"):
            await engine.generate([PROMPT, PROMPT[:9]], pb.Sampling(max_tokens=4))
