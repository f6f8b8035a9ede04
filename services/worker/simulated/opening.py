"""Opens simulated workers: our engine with its scheduler, prefix cache and transfers, on simulated ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.common.lifecycle import StartupError
from services.common.tls.credentials import Tls
from services.compute.model.footprint import footprint
from services.compute.model.loading.folder import ModelFolder, open_folder
from services.compute.model.spec import ModelError
from services.compute.ranks.config import RankGroupConfig
from services.worker.engine.base import LifeObserver, OutputSink, StepObserver
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.request import EngineRequest
from services.worker.engine.state import EngineModel
from services.worker.native.config import EngineConfig
from services.worker.native.engine import NativeEngine
from services.worker.native.opening import describe_engine
from services.worker.native.startup import group_config
from services.worker.protocol.event_codec import ModelFacts
from services.worker.settings import DEFAULT_KV_TOKENS, WorkerSettings
from services.worker.simulated.curve import DEFAULT_CURVE, CurveError, StepCurve
from services.worker.simulated.language import Language, read_words
from services.worker.simulated.ranks import SimulatedRanks, Simulation


class SimulationArguments(BaseModel):
    """Arguments of simulated workers, in RYZANSTEIN_ENGINE_ARGS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    curve: Path = DEFAULT_CURVE
    speed: float = Field(1.0, gt=0, le=1e6)
    answer_tokens: int = Field(128, ge=1, le=1_000_000)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SimulationArguments:
        """Check arguments. Raises StartupError."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            known = ", ".join(cls.model_fields)
            problems = (f"{each['loc'][0]}: {each['msg']}" for each in error.errors())
            raise StartupError(f"RYZANSTEIN_ENGINE_ARGS {'; '.join(problems)} (there are: {known})") from error


class SimulatedEngine(NativeEngine):
    """Our engine on simulated ranks, whose faults are theirs to make."""

    def __init__(
        self,
        config: EngineConfig,
        model: EngineModel,
        ranks: SimulatedRanks,
        steps: StepObserver,
        life: LifeObserver,
    ) -> None:
        super().__init__(config, model, ranks, steps, life)
        self.ranks = ranks

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        """Accept a request. Raises InvalidRequestError for a grammar, which simulated ranks do not follow."""
        if request.sampling.grammar:
            raise InvalidRequestError("grammar", "a simulated worker follows no grammar: it answers with random words")
        super().submit(request, sink)

    def _check_room(self, promised_bytes: int) -> None:
        """Simulated ranks take no memory."""


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model of which every virtual worker of a process is a replica."""

    config: EngineConfig
    model: EngineModel
    simulation: Simulation

    def engine(self, steps: StepObserver, life: LifeObserver) -> SimulatedEngine:
        """Make the engine of one virtual worker."""
        ranks = SimulatedRanks(self.config.ranks, self.simulation)
        return SimulatedEngine(self.config, self.model, ranks, steps, life)


async def open_model(settings: WorkerSettings, folder: Path, tls: Tls | None = None) -> SimulatedModel:
    """Read the curve and all files of a model but its weights, which need not be there. Raises StartupError."""
    arguments = SimulationArguments.of(settings.engine_args)
    try:
        curve = StepCurve.read(arguments.curve)
        files = await asyncio.to_thread(lambda: open_folder(folder, whole=False).require())
    except CurveError as error:
        raise StartupError(f"RYZANSTEIN_ENGINE_ARGS curve: {error}") from error
    except ModelError as error:
        raise StartupError(f"RYZANSTEIN_MODEL {error}") from error
    kv_tokens = settings.kv_tokens or curve.kv_tokens or DEFAULT_KV_TOKENS
    settings = settings.model_copy(update={"device": curve.device, "kv_tokens": kv_tokens})
    ranks = group_config(settings, files)
    config, model = await describe_engine(settings, files, ranks, tls)
    # Apart from the native engine's: KV of one is no KV of the other.
    model = replace(model, engine="simulated", hash_root=f"simulated:{model.hash_root}")
    return SimulatedModel(config, model, await asyncio.to_thread(_simulation, arguments, curve, files, ranks))


async def open_simulated(
    settings: WorkerSettings, folder: Path, steps: StepObserver, life: LifeObserver, tls: Tls | None = None
) -> SimulatedEngine:
    """Open one simulated worker. Raises StartupError."""
    return (await open_model(settings, folder, tls)).engine(steps, life)


def _simulation(
    arguments: SimulationArguments, curve: StepCurve, files: ModelFolder, ranks: RankGroupConfig
) -> Simulation:
    vocab_size = files.spec.vocab_size
    words = read_words(files.tokenizer.json, vocab_size)
    size = ranks.embedding_size or files.spec.hidden_size
    if files.spec.classifier is not None:
        size = len(files.spec.classifier.labels)
    return Simulation(
        curve,
        Language(words, files.eos_token_ids, arguments.answer_tokens, ranks.block_tokens),
        ModelFacts(vocab_size, size),
        footprint(files.spec, ranks).kv_token,
        arguments.speed,
    )
