"""The benches of `make bench` and their sizes: one round takes about a minute and a half on two cores."""

from __future__ import annotations

from dataclasses import dataclass

from services.cli.stack.default_model import TINY_MODEL

RANDOM_100M = "{random-100m}"  # placeholder for a checkpoint that is created once per run
SHAPE = "100m"


@dataclass(frozen=True)
class Step:
    """One bench: a module that takes `--json FILE`."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    served: bool = False  # takes the `--url` of an installation, which runs for this step alone


def _serve(concurrency: int, requests: int) -> Step:
    sizes = ("--concurrency", str(concurrency), "--requests", str(requests), "--output-tokens", "64")
    return Step(f"serve-{concurrency}", "bench.serve", sizes, served=True)


_ENGINE = ("--ranks", "2", "--rounds", "1", "--batches")

STEPS = (
    Step("scheduler", "bench.scheduler"),
    Step("coordinator", "bench.coordinator", ("--workers", "100", "--blocks", "5000", "--events", "500")),
    Step("collectives", "bench.collectives"),
    Step("engine-tiny", "bench.engine", (str(TINY_MODEL), *_ENGINE, "1,16")),
    Step("engine-100m", "bench.engine", (RANDOM_100M, *_ENGINE, "1,16")),
    Step("router", "bench.router", ("--workers", "100", "--rate", "200", "--seconds", "3")),
    Step("gateway", "bench.gateway", ("--rounds", "1", "--streams", "200")),
    Step("start", "bench.start", ("--rounds", "1", "--model", TINY_MODEL.name, "--arguments", f"--model {TINY_MODEL}")),
    _serve(1, 4),
    _serve(16, 64),
)


def chosen(names: list[str]) -> tuple[Step, ...]:
    """The steps of these names, all without names; raises ValueError for an unknown name."""
    known = {step.name: step for step in STEPS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no bench called {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else STEPS


def turned(steps: tuple[Step, ...], number: int) -> tuple[Step, ...]:
    """Rotate the steps, so that another one goes first in every round and drift of the machine affects all alike."""
    cut = number % len(steps)
    return steps[cut:] + steps[:cut]
