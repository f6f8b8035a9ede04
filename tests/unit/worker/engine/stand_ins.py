"""A model's description, an observer that counts nothing, and an engine that is not started."""

from __future__ import annotations

from services.worker.engine.base import Engine, StepReport
from services.worker.engine.state import EngineFacts, EngineModel
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import open_simulated
from tests.models import BUNDLED_MODEL

MODEL = EngineModel(
    architecture="StandInForCausalLM",
    dtype="float32",
    device="cpu",
    tensor_parallel=1,
    hash_root="stand-in",
    tokenizer_json=b"{}",
    chat_template="",
    special_tokens={},
    add_bos_token=False,
    eos_token_ids=(1,),
    sampling_defaults={},
)


class NoObserver:
    def on_step(self, report: StepReport) -> None: ...

    def on_adapter_load(self, source: str, result: str, seconds: float) -> None: ...

    def on_first_output(self, queue_s: float, total_s: float) -> None: ...

    def on_started(self, facts: EngineFacts) -> None: ...

    def on_lost(self, cause: str, rank: int | None) -> None: ...

    def on_woken(self, seconds: float) -> None: ...

    def on_drain(self) -> None: ...


async def idle_engine() -> Engine:
    settings = WorkerSettings(model=str(BUNDLED_MODEL), engine="simulated", kv_tokens=512)
    return await open_simulated(settings, BUNDLED_MODEL, NoObserver(), NoObserver())
