"""Curves of steps: what a file may say, and the seconds between its points."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.lifecycle import StartupError
from services.worker.settings import WorkerSettings
from services.worker.simulated.curve import DEFAULT_CURVE, CurveError, StepCurve
from services.worker.simulated.opening import SimulationArguments, open_model
from tests.models import BUNDLED_MODEL

CURVE = {
    "machine": "a CPU, 2 cores",
    "model": "m",
    "device": "cpu",
    "dtype": "bfloat16",
    "tensor_parallel": 1,
    "decode": [{"rows": 1, "seconds": 0.01}, {"rows": 11, "seconds": 0.03}],
    "decode_key_s": 1e-6,
    "prefill": [{"rows": 16, "seconds": 0.02}, {"rows": 116, "seconds": 0.12}],
    "prefill_key_s": 1e-7,
}


def curve(**changed: object) -> StepCurve:
    return StepCurve.model_validate(CURVE | changed)


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        ((1, 0, 0, 0), 0.01),
        ((6, 0, 0, 0), 0.02),
        ((21, 0, 0, 0), 0.05),  # beyond the last point
        ((1, 1000, 0, 0), 0.011),
        ((0, 0, 4, 0), 0.02),  # below the first point
        ((0, 0, 66, 0), 0.07),
        ((0, 0, 16, 10_000), 0.021),
        ((1, 0, 66, 0), 0.07),  # the weights are read once
        ((0, 0, 0, 0), 0.0),
    ],
)
def test_step_takes_the_time_between_its_neighbours(load: tuple[int, float, int, float], seconds: float) -> None:
    assert curve().seconds(*load) == pytest.approx(seconds)


@given(st.integers(0, 300), st.integers(0, 5000))
def test_more_rows_never_take_less_time(n_decodes: int, n_prefill: int) -> None:
    default = StepCurve.read(DEFAULT_CURVE)
    assert default.seconds(n_decodes, 0, n_prefill, 0) <= default.seconds(n_decodes + 1, 0, n_prefill + 1, 0)


def test_curve_shipped_as_default_names_its_machine_and_its_model() -> None:
    default = StepCurve.read(DEFAULT_CURVE)
    assert re.search(r"\d+ cores", default.machine)
    assert default.model


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"decode": []}, "decode: "),
        ({"decode": [{"rows": 2, "seconds": 1}, {"rows": 2, "seconds": 2}]}, "decode: .*rows grow"),
        ({"prefill": [{"rows": 0, "seconds": 1}]}, r"prefill\.0\.rows: "),
        ({"prefill": [{"rows": 1, "seconds": 0}]}, r"prefill\.0\.seconds: "),
        ({"decode_key_s": -1}, "decode_key_s: "),
        ({"decode_key_s": float("nan")}, "decode_key_s: "),
        ({"device": "tpu"}, "device: .*'cpu' or 'cuda'"),
        ({"machines": "x"}, "machines: Extra inputs"),
    ],
)
def test_curve_is_refused_by_file_and_field(changed: dict[str, object], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(CURVE | changed))
    with pytest.raises(CurveError, match=f"{file}.*{complaint}"):
        StepCurve.read(file)


def test_curve_that_was_written_is_read_back(tmp_path: Path) -> None:
    curve().write(tmp_path / "c.json")
    assert StepCurve.read(tmp_path / "c.json") == curve()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"speed": 0}, "speed: .*greater than 0"),
        ({"answer_tokens": 0}, "answer_tokens: "),
        ({"velocity": 2}, "velocity: Extra.*there are: curve, speed, answer_tokens"),
    ],
)
def test_arguments_of_a_simulation_are_refused_by_name(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(StartupError, match=f"RYZANSTEIN_ENGINE_ARGS {complaint}"):
        SimulationArguments.of(arguments)


async def test_missing_curve_ends_the_worker_at_its_start(tmp_path: Path) -> None:
    settings = WorkerSettings(model="m", engine="simulated", engine_args={"curve": str(tmp_path / "no.json")})
    with pytest.raises(StartupError, match=r"RYZANSTEIN_ENGINE_ARGS curve: .*no\.json: No such file"):
        await open_model(settings, BUNDLED_MODEL)


def test_worker_opens_its_model_where_torch_is_not_installed() -> None:
    code = (
        "import asyncio, pathlib, sys; sys.modules['torch'] = None\n"
        "import services.worker.main as worker; from services.worker.settings import WorkerSettings\n"
        "settings = WorkerSettings(model=sys.argv[1], engine='simulated')\n"
        "asyncio.run(worker.open_model(settings, pathlib.Path(settings.model)))"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(BUNDLED_MODEL)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_process_holds_several_workers_only_if_simulated() -> None:
    with pytest.raises(ValueError, match=r"RYZANSTEIN_VIRTUAL_WORKERS 2: .*RYZANSTEIN_ENGINE simulated"):
        WorkerSettings(model="m", virtual_workers=2)
    several = WorkerSettings(model="m", worker_id="w", virtual_workers=3, engine="simulated")
    assert several.worker_ids == ("w-0", "w-1", "w-2")
    assert WorkerSettings(model="m", worker_id="w").worker_ids == ("w",)
