"""`ryzanstein check` refuses a model in the words of a worker that refuses to start with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.common.lifecycle import StartupError
from services.tools.checker.report import check
from services.worker.process.failure import FailureKind, RankFailure
from tests.integration.worker_server.conftest import running_worker
from tests.integration.worker_server.gateway import until
from tests.integration.worker_server.processes import server_process
from tests.models import BUNDLED_MODEL


@pytest.mark.parametrize("ranks", [1, 7])
def test_worker_start_reports_the_reasons_of_the_check(tmp_path: Path, redis_url: str, ranks: int) -> None:
    """All reasons of a model with a recurrent state and a broken tokenizer; the one of a number of ranks."""
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model)
    if ranks == 1:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": ["Lfm2ForCausalLM"]}))
        (model / "tokenizer.json").write_text("{")
    report = check(str(model), [ranks], "cpu")
    if ranks == 1:
        assert len(report.problems) == 2
        problem = f"RYZANSTEIN_MODEL {'; '.join(report.problems)}"
    else:
        problem = report.ranks[0].problem
        assert "1, 2, 4 or 8 ranks work" in problem
    with server_process(tmp_path, redis_url, DEVICE="cpu", MODEL=str(model), TENSOR_PARALLEL=str(ranks)) as server:
        assert server.process.wait(120) == 1
        (line,) = server.log.read_text().splitlines()
    assert json.loads(line)["message"] == f"cannot start: {problem}"


NOWHERE = {"a": "/no/such", "b": "/no/such"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapter_pins": ["x"]}, "RYZANSTEIN_ADAPTER_PINS x: not a name in RYZANSTEIN_ADAPTERS"),
        ({"adapters": NOWHERE}, "RYZANSTEIN_ADAPTERS a: /no/such: "),
        (
            {"adapters": NOWHERE, "adapter_pins": ["a", "b"], "adapter_slots": 2},
            "RYZANSTEIN_ADAPTER_PINS: 2 adapters; at most 1 of the 2 slots (RYZANSTEIN_ADAPTER_SLOTS)",
        ),
    ],
)
async def test_settings_of_adapters_are_refused_by_name(redis_url: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError) as refused:
        async with running_worker(redis_url, **settings):
            pass
    assert said in str(refused.value)


async def test_ranks_that_do_not_start_at_first_end_the_worker(redis_url: str) -> None:
    with pytest.raises(StartupError, match="the ranks did not start: rank 0 error: no weights"):  # noqa: PT012
        async with running_worker(redis_url, hold_start=True) as worker:
            worker.group.start_failure = RankFailure(0, FailureKind.ERROR, "no weights")
            worker.group.may_start.set()
            await until(worker.task.done)
