"""Brings the product's decoders into a rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from services.worker.loading.vocabulary import read_vocabulary
from services.worker.model.build import load_model
from services.worker.model.kv_cache import KvCache
from services.worker.parallel.communicator import Communicator
from services.worker.ranks.process import LoadedModel
from services.worker.transport.event_codec import ModelFacts
from services.worker.transport.settings import RankGroupConfig


def load(config: RankGroupConfig, comm: Communicator, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Read this rank's share of the checkpoint at `config.model_path`. Raises ModelError."""
    decoder = load_model(Path(config.model_path), comm, dtype, device, config.max_model_len)
    spec = decoder.spec

    def make_cache(n_blocks: int) -> KvCache:
        return KvCache(spec, comm, n_blocks, config.block_size, dtype, device, decoder.kernels)

    return LoadedModel(
        decoder=decoder,
        facts=ModelFacts(spec.vocab_size, spec.hidden_size, spec.n_layers, config.max_model_len),
        kv_bytes_per_token=KvCache.bytes_per_token(spec, comm.size, dtype),
        make_cache=make_cache,
        vocabulary=partial(read_vocabulary, Path(config.model_path), spec.vocab_size, config.eos_token_ids),
    )
