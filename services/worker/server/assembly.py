"""Makes an engine for every generation of ranks."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.scheduler import Scheduler
from services.worker.server.card import build_card, kv_layout
from services.worker.server.core import WorkerCore
from services.worker.server.engine import Engine, StepObserver
from services.worker.server.kv_store import KvStore
from services.worker.server.model_files import ModelFiles
from services.worker.server.probe import submit_probe
from services.worker.server.recovery import Ranks
from services.worker.server.settings import WorkerSettings
from services.worker.server.submits import ModelLimits
from services.worker.supervision.rank_group import GroupStarted, RankGroupConfig


class Assembly:
    """What engines are made of, and the model card, which needs the ranks' own words."""

    def __init__(
        self,
        settings: WorkerSettings,
        files: ModelFiles,
        config: RankGroupConfig,
        core: WorkerCore,
        observer: StepObserver,
        ranks: Ranks,
    ) -> None:
        self._settings = settings
        self._files = files
        self._config = config
        self._core = core
        self._observer = observer
        self._ranks = ranks
        self.card: pb.ModelCard | None = None

    def engage(self, started: GroupStarted) -> Engine:
        """The ranks have started: take requests."""
        core, config = self._core, self._config
        core.life.started(started)
        sizes = SchedulerConfig(
            n_blocks=started.n_blocks,
            block_tokens=config.block_size,
            max_model_len=config.max_model_len,
            max_running=config.max_slots,
            max_batched_tokens=max(self._settings.max_batched_tokens, config.max_slots),
            max_in_flight=config.depth,
        )
        scheduler = Scheduler(sizes, core.kv_log, core.counters)
        engine = Engine(
            scheduler,
            core.meter,
            self._ranks.submit,
            self._observer,
            core.changes.announce,
            self._settings.prefill_step_ms / 1e3,
        )
        most = scheduler.capacity.max_request_tokens
        recommended = self._settings.sampling_defaults
        self.card = build_card(core.identity, self._files, config, started, most, recommended=recommended)
        vocab_size = started.model.vocab_size
        layout = kv_layout(self._files, config, started)
        limits = ModelLimits(vocab_size, self._files.eos_token_ids, layout.hash_root, self._files.spec.generates)
        core.serve(KvStore(engine, self._ranks, layout), limits)
        if not core.meter.decode_step_ms:
            submit_probe(engine, vocab_size)
        return engine
