"""The model card: what a gateway must know to prepare prompts for this worker."""

from __future__ import annotations

import time
from dataclasses import asdict

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.core import Identity
from services.worker.api.model_files import ModelFiles
from services.worker.process.rank_group import GroupStarted, RankGroupConfig


def hash_root(files: ModelFiles, config: RankGroupConfig) -> str:
    """What block hashes start from: KV of another model, dtype or rope must never be taken for this one's."""
    return ":".join(filter(None, (files.identity, config.dtype, files.spec.rope_choice(config.max_model_len))))


def kv_layout(files: ModelFiles, config: RankGroupConfig, started: GroupStarted) -> pb.KvLayout:
    """What must be equal on two workers before KV blocks move between them."""
    return pb.KvLayout(
        hash_root=hash_root(files, config),
        device=config.device,
        tensor_parallel=config.ranks,
        block_tokens=config.block_size,
        block_bytes=started.ranks[0].kv_block_bytes,
    )


def build_card(
    identity: Identity,
    files: ModelFiles,
    config: RankGroupConfig,
    started: GroupStarted,
    max_request_tokens: int,
    *,
    recommended: bool,
) -> pb.ModelCard:
    """Everything is known once the ranks have started; `recommended`: with the publisher's sampling defaults."""
    ledger = started.ledger
    defaults = {name: value for name, value in asdict(files.sampling).items() if value is not None}
    return pb.ModelCard(
        model=identity.model,
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        max_model_len=max_request_tokens,
        vocab_size=started.model.vocab_size,
        eos_token_ids=files.eos_token_ids,
        tokenizer_json=files.tokenizer_json,
        chat_template=files.chat_template,
        special_tokens=files.special_tokens,
        add_bos_token=files.add_bos_token,
        hash_root=hash_root(files, config),
        hidden_size=started.model.hidden_size,
        dtype=config.dtype,
        tensor_parallel=config.ranks,
        created=int(time.time()),
        architecture=files.architecture,
        startup=[pb.StartupPhase(name=name, ms=seconds * 1e3) for name, seconds in started.phases.items()],
        sampling_defaults=pb.SamplingDefaults(**defaults) if recommended else None,
        memory_bytes={"weights": ledger.weights, "workspace": ledger.workspace, "kv": ledger.kv_cache},
    )
