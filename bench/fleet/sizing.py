"""Sizes of a fleet by the options: numbers of workers, their speed, and a model that holds the longest request."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from services.gateway.generation.poison import CLEARING_TOKENS
from services.worker.settings import DEFAULT_KV_TOKENS

SCALED_CURVE = Path(__file__).parent / "steps.json"  # its steps take a second
_KV_REQUESTS = 2  # longest requests that a worker's KV cache holds, at least
SILENCE_S = 2.5  # RYZANSTEIN_SILENCE_TIMEOUT_S where it is not set
_LONGEST_SILENCE_S = 8.0  # below the time of the pings that take a silent worker for dead
_PATIENCE_S = 180.0  # for a token
_PATIENCE_STEPS = 3 * CLEARING_TOKENS  # a suspect of poison waits until those before it are cleared
_KEEPING = 0.8  # share of the rate that keeps the streams open
_WAIT_STEPS = 0.7  # until a request is in a step; plans are made when four fifths of the step before are over


def sizes_of(sweep: str) -> list[int]:
    """The numbers of workers; raises typer.BadParameter."""
    sizes = [part.strip() for part in sweep.split(",")]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise typer.BadParameter(f"--sweep: expected numbers of workers such as 10,100,300, not {sweep!r}")
    return [int(size) for size in dict.fromkeys(sizes)]


def settings_of(given: Sequence[str]) -> dict[str, str]:
    """Settings by their names; raises typer.BadParameter."""
    settings = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"--set: expected NAME=VALUE such as STEP_MERGE_MS=50, not {each!r}")
        settings[name] = value
    return settings


@dataclass(frozen=True, slots=True)
class ScaledTime:
    """A time in which every step takes `step_s`, however many requests are in it, and limits that follow from it.

    Steps whose time grew with their requests would queue more of these the slower they were, without an end.
    """

    step_s: float

    @classmethod
    def of(cls, streams: int, rate: float, answer_tokens: int) -> ScaledTime:
        """The time in which four fifths of `rate`, in answers a second, keep `streams` of them open.

        A machine that is busy for a moment, or with faults, can open as many again.
        """
        return cls(streams / (_KEEPING * rate * (answer_tokens + _WAIT_STEPS)))

    @property
    def speed(self) -> float:
        """How many times faster than the curve."""
        return 1 / self.step_s

    @property
    def patience_s(self) -> float:
        """The longest wait of a client for a token."""
        return max(_PATIENCE_S, _PATIENCE_STEPS * self.step_s)

    @property
    def settings(self) -> dict[str, str]:
        """Settings of the services. Heartbeats of a thousand workers with slow steps would take more than two cores."""
        silence_s = min(max(SILENCE_S, self.step_s), _LONGEST_SILENCE_S)
        limits = {"SILENCE_TIMEOUT_S": silence_s, "PROGRESS_TIMEOUT_S": 8 * silence_s, "SSE_HEARTBEAT_S": 60.0}
        return {name: str(value) for name, value in (limits | {"PREFILL_STEP_MS": self.step_s * 1e3}).items()}


@contextmanager
def sized_model(model: Path, longest: int) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder of the model whose positions hold `longest` tokens, and settings of workers whose KV cache does.

    Simulated workers read no weights, so a copy of the other files with more positions is a longer model to them.
    """
    config = json.loads((model / "config.json").read_text())
    kv_tokens = _KV_REQUESTS * longest
    settings = {"KV_TOKENS": str(kv_tokens)} if kv_tokens > DEFAULT_KV_TOKENS else {}
    if config["max_position_embeddings"] >= longest:
        yield model, settings
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / model.name
        shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
        yield copy, settings
