"""Loads our decoders into a rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from services.compute.backends.base import ModelBackend
from services.compute.backends.collectives import Communicator
from services.compute.model.adapters.served import read_adapter
from services.compute.model.build import load_model
from services.compute.model.footprint import footprint
from services.compute.model.layers.adapters import AdapterLayers, AdapterTensors
from services.compute.model.layers.head import load_dense
from services.compute.model.layers.towers import load_tower
from services.compute.model.loading.folder import KnownFiles, open_folder
from services.compute.model.loading.vocabulary import read_vocabulary
from services.compute.ranks.config import RankGroupConfig
from services.worker.protocol.event_codec import ModelFacts
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.rank.awake import LoadedModel, refuse_adapter


def load(
    config: RankGroupConfig, comm: Communicator, backend: ModelBackend, known: KnownFiles | None = None
) -> LoadedModel:
    """Read this rank's share of the checkpoint at `config.model_path`. Raises ModelError.

    What is `known` of its files is read and checked again only if they have changed.
    """
    folder, layers = open_folder(Path(config.model_path)), AdapterLayers(config.adapter_slots, config.adapter_max_rank)
    states, unchanged = folder.states, False
    if known is not None and known.states == states:
        folder, unchanged = replace(folder, described=known.description), True
    decoder = load_model(
        folder.description,
        comm,
        backend,
        config.max_model_len,
        config.quantization,
        layers,
        checked=unchanged,
    )
    spec, files = decoder.spec, KnownFiles.of(folder, states)

    by_digest = dict[str, AdapterTensors]()

    def load_adapter(order: AdapterOrder) -> None:
        for digest in order.forget:
            by_digest.pop(digest, None)
        if not order.folder:
            layers.put(order.slot, by_digest[order.digest])
            return
        tensors = layers.read(read_adapter(Path(order.folder), files.description, config.adapter_max_rank))
        layers.put(order.slot, tensors)
        if order.keep:
            by_digest[order.digest] = tensors

    head = decoder.classifier
    if not head:
        head = load_dense(folder.path, folder.pooling.dense, spec.hidden_size, backend.device)
    size = len(head[-1].weight) if head else spec.hidden_size
    sizes = footprint(spec, config)
    images = folder.images
    return LoadedModel(
        decoder=decoder,
        facts=ModelFacts(spec.vocab_size, min(size, config.embedding_size or size), dict(decoder.weight_formats)),
        kv_bytes_per_token=sizes.kv_token,
        make_cache=partial(
            decoder.make_cache,
            block_tokens=config.block_tokens,
            state_rows=config.state_rows,
            summarised=config.page_summaries,
        ),
        footprint=sizes,
        head=head,
        embeds=not spec.generates,
        files=files,
        load_adapter=load_adapter if config.adapter_slots else refuse_adapter,
        forget_adapters=by_digest.clear,
        tower=None
        if images is None
        else load_tower(folder.description, backend, spec.hidden_size, images.mean, images.std),
        vocabulary=partial(read_vocabulary, folder.path, spec.vocab_size, config.eos_token_ids),
    )
