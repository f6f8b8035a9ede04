"""What is served here: its card, which gateways prepare prompts by, and what requests are checked against."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.model_files import ModelFiles
from services.worker.api.submits import ModelLimits
from services.worker.process.rank_group import GroupStarted, RankGroupConfig
from services.worker.scheduling.admission import Capacity


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is."""

    worker_id: str
    incarnation: str  # a UUID per process start
    model: str


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A model as this worker serves it; the rest is known once ranks have started."""

    identity: Identity
    files: ModelFiles
    config: RankGroupConfig
    recommended: bool  # requests get the publisher's sampling defaults
    created: int  # Unix time

    @property
    def hash_root(self) -> str:
        """What block hashes start from: KV of another model, dtype or rope must never be taken for this one's."""
        rope = self.files.spec.rope_choice(self.config.max_model_len)
        return ":".join(filter(None, (self.files.identity, self.config.dtype, rope)))

    def limits(self, started: GroupStarted) -> ModelLimits:
        """What the fields of a request must keep to."""
        files = self.files
        return ModelLimits(started.model.vocab_size, files.eos_token_ids, self.hash_root, files.spec.generates)

    def card(self, started: GroupStarted) -> pb.ModelCard:
        """Everything that a gateway asks for."""
        files, config, identity, ledger = self.files, self.config, self.identity, started.ledger
        defaults = {name: value for name, value in asdict(files.sampling).items() if value is not None}
        return pb.ModelCard(
            model=identity.model,
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            max_model_len=Capacity(config.max_model_len, started.n_blocks * config.block_size).max_request_tokens,
            vocab_size=started.model.vocab_size,
            eos_token_ids=files.eos_token_ids,
            tokenizer_json=files.tokenizer_json,
            chat_template=files.chat_template,
            special_tokens=files.special_tokens,
            add_bos_token=files.add_bos_token,
            hash_root=self.hash_root,
            hidden_size=started.model.hidden_size,
            dtype=config.dtype,
            tensor_parallel=config.ranks,
            created=self.created,
            architecture=files.architecture,
            startup=[pb.StartupPhase(name=name, ms=seconds * 1e3) for name, seconds in started.phases.items()],
            sampling_defaults=pb.SamplingDefaults(**defaults) if self.recommended else None,
            memory_bytes={"weights": ledger.weights, "workspace": ledger.workspace, "kv": ledger.kv_cache},
        )
