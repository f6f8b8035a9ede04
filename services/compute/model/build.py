"""Builds one rank's decoder from a checkpoint."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from services.compute.backends.base import Attention, ModelBackend, Norm
from services.compute.backends.collectives import Communicator
from services.compute.backends.shapes import AttentionShape
from services.compute.backends.sizing import available_host_memory
from services.compute.model.agreement import check_counts, check_shapes
from services.compute.model.blocks import load_block, load_shared_layer
from services.compute.model.decoder import Decoder, DecoderLayer, Layer, LayerNorms, Mixing, Tables
from services.compute.model.families.config import MAX_LAYERS
from services.compute.model.families.fused import stacked_refs
from services.compute.model.formats.gguf.tensors import BlockReader, GgufTensors
from services.compute.model.formats.grids import GridReader
from services.compute.model.formats.microscaled import MicroscaledReader
from services.compute.model.formats.safetensors import TensorFiles
from services.compute.model.formats.stored import StoredModules, StoredTensors
from services.compute.model.layers.adapters import AdapterLayers
from services.compute.model.layers.attention import StepPlaces, load_attention
from services.compute.model.layers.embedding import divide_vocabulary, load_embedding, load_vocabulary
from services.compute.model.layers.head import load_classifier
from services.compute.model.layers.latent import load_latent_attention
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.mixing import ParallelMixer, load_mixer
from services.compute.model.layers.mlp import Mlp, load_mlp
from services.compute.model.layers.moe import MoeMlp, load_moe
from services.compute.model.layers.norm import load_norm
from services.compute.model.layers.rope import by_places, check_tables, explain_rope, query_scale_tables, rope_tables
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.registry import Description
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import LayerSpec, ModelError, ModelSpec
from services.compute.ranks.config import Quantization

logger = logging.getLogger(__name__)


def load_model(
    model: Description,
    comm: Communicator,
    backend: ModelBackend,
    max_positions: int | None = None,
    quantization: Quantization = "none",
    adapters: AdapterLayers | None = None,
    *,
    checked: bool = False,
) -> Decoder:
    """Load this rank's share of a checkpoint.

    `max_positions` is the length of the longest sequence; None: the model's largest. It sizes position tables and
    decides between LongRoPE's short and long factors. `quantization` rounds weights that are stored unquantized;
    `adapters` is the room for adapters, None for none. `checked`: the weights are known to be finite.
    Raises ModelError naming the file and the key.
    """
    with torch.inference_mode(), open_checkpoint(model, None if checked else backend.dtype) as (spec, source):
        max_positions = max_positions or spec.max_positions
        if max_positions > spec.max_positions:
            raise ModelError(f"{model.path}: {max_positions} positions: the model was made for {spec.max_positions}")
        adapters = adapters or AdapterLayers()
        load = LinearLoader(source, comm, backend, quantization=quantization, adapters=adapters)
        return build_decoder(spec, load, max_positions)


@contextmanager
def open_checkpoint(model: Description, dtype: torch.dtype | None) -> Iterator[tuple[ModelSpec, Checkpoint]]:
    """Open a checkpoint; its weights have to be finite in `dtype`, None: are so. Raises ModelError."""
    config, family, spec = model.config, model.family, model.spec
    # Additional layers after the last one only draft tokens (multi-token prediction).
    drafts = "num_nextn_predict_layers"
    n_drafts = config.integer(drafts, at_most=MAX_LAYERS) if config.raw(drafts) else 0
    after = range(spec.n_layers, spec.n_layers + n_drafts)
    ignored = (*family.ignored, *(f"{layers}.{index}.*" for index in after for layers in ("*layers", "blk")))
    with _open_stored(model) as (files, quantized):
        check_counts(config, family, spec, n_drafts, files)  # before references are made for all layers
        # A stored head is used even if the config ties the head to the embedding.
        stored = {"head": family.refs(replace(spec, tied=False))["head"]}
        stored |= stacked_refs(spec, family.stacked, partial(_shape, files, family.optional_prefix))
        prefix = family.optional_prefix
        if spec.left_out:
            logger.info("not loaded: %s", spec.left_out)
        source = Checkpoint(files, family.refs(spec), ignored, prefix, stored, quantized, dtype)
        check_shapes(config, family, spec, source)
        yield spec, source


def _shape(files: StoredTensors, optional_prefix: str, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor, whose name may lack the prefix; () if it is not stored."""
    return next((files.shape(one) for one in (name, name.removeprefix(optional_prefix)) if one in files.names), ())


@contextmanager
def _open_stored(model: Description) -> Iterator[tuple[StoredTensors, tuple[StoredModules, ...]]]:
    """Open the tensors, and the readers of quantized modules. Raises ModelError."""
    if model.gguf is not None:
        with closing(GgufTensors(model.path, model.gguf)) as blocks:
            yield blocks, (BlockReader(blocks),)
        return
    with closing(TensorFiles(model.path, model.family.prefixes, model.family.ignored)) as files:
        layouts = model.spec.quantization
        yield files, tuple(MicroscaledReader(files) if one.microscaled else GridReader(files, one) for one in layouts)


def build_decoder(
    spec: ModelSpec, load: LinearLoader, max_positions: int, layers: Sequence[int] | None = None
) -> Decoder:
    """Build the decoder of `spec` for sequences up to `max_positions` from the tensors of `load`. Raises ModelError.

    `layers`: the numbers of its layers; None: all.
    """
    backend, attention = load.backend, _open_attention(spec, load)
    check_tables(spec.ropes, max_positions, available_host_memory())
    chosen = range(spec.n_layers) if layers is None else layers
    built = _load_layers(spec, load, chosen, attention)
    vocabulary = divide_vocabulary(spec.vocab_size, load.comm)
    if spec.bidirectional:
        embed, head = load_embedding(load, vocabulary, spec.vocab_size, spec.hidden_size), None
    else:
        embed, head = load_vocabulary(load, vocabulary, spec.vocab_size, spec.hidden_size)
    positions = token_types = None
    if spec.learned_positions:
        shape = (spec.max_positions, spec.hidden_size)
        served = Shard("positions", shape, Span(0, max_positions), Span(0, spec.hidden_size))
        positions = load.weight([served]).dense(backend.dtype, backend.device)
    if spec.n_token_types:
        types = Shard.whole("token_types", (spec.n_token_types, spec.hidden_size))
        token_types = load.weight([types]).dense(backend.dtype, backend.device)
    formats = {kind: _in_words(forms) for kind, forms in load.forms.items()}
    logger.info("weights: %s", ", ".join(f"{kind} {form}" for kind, form in formats.items()))
    tables = [rope_tables(rope, max_positions) for rope in spec.ropes]
    tables += [query_scale_tables(scale, spec.head_dim, max_positions) for scale in spec.query_scales]
    rotary = tuple(
        by_places(backend.ops.rope, (cos, sin), axes) if axes else backend.ops.rope(cos, sin)
        for (cos, sin), axes in zip(
            [(cos.to(backend.device), sin.to(backend.device)) for cos, sin in tables],
            [*(rope.axes for rope in spec.ropes), *(() for _ in spec.query_scales)],
            strict=True,
        )
    )
    for rope in spec.ropes:
        logger.info("rope: %s", explain_rope(rope, max_positions))
    return Decoder(
        spec,
        load.comm,
        backend,
        embed=embed,
        layers=built,
        embed_norm=load_norm(spec, load, "embed_norm") if spec.embed_norm else None,
        norm=load_norm(spec, load, "norm") if spec.final_norm else lambda x: x,
        head=head,
        vocabulary=vocabulary,
        tables=Tables(max_positions, rotary, spec.reaches, positions, token_types),
        attention=attention,
        classifier=load_classifier(spec, load.source, backend.device),
        frames=backend.frames(attention_shape(spec, load)) if spec.vision and spec.vision.sees_ahead else None,
        weight_formats=formats,
        adapters=load.adapters,
    )


def _in_words(forms: Counter[str]) -> str:
    """Return the forms of a kind of weight, with their numbers if there are several."""
    counted = forms.most_common()
    return counted[0][0] if len(counted) == 1 else " and ".join(f"{count} x {form}" for form, count in counted)


def _open_attention(spec: ModelSpec, load: LinearLoader) -> Attention[Any] | None:
    """Return the attention of a rank's heads; None if no layer attends. Raises ModelError."""
    if not spec.n_attending:
        spec.kv_heads_per_rank(load.comm.size)  # refuses numbers of ranks
        return None
    heads = attention_shape(spec, load)
    return load.backend.bidirectional(heads) if spec.bidirectional else load.backend.attention(heads)


def attention_shape(spec: ModelSpec, load: LinearLoader) -> AttentionShape:
    """Return the rank's heads. Raises ModelError when they cannot be divided."""
    n_kv_heads, mine = spec.kv_heads_per_rank(load.comm.size), load.share(spec.n_heads)
    sinks: tuple[tuple[float, ...], ...] = ()
    if spec.sinks:
        attending = (index for index, layer in enumerate(spec.layers) if layer.attends)
        stored = (load.source.vector(f"layers.{index}.sinks", spec.n_heads, mine) for index in attending)
        sinks = tuple(tuple(scores.tolist()) for scores in stored)
    return AttentionShape(
        len(mine),
        n_kv_heads,
        spec.head_dim,
        spec.attention_scale,
        spec.attention_softcap,
        spec.alibi_slopes[mine.start : mine.stop],
        sinks,
    )


def _load_layers(
    spec: ModelSpec, load: LinearLoader, chosen: Sequence[int], attention: Attention[Any] | None
) -> list[Layer]:
    layers: list[Layer] = []
    blocks = [load_block(spec, load, number) for number in range(spec.n_blocks)]
    for index in chosen:
        layer, shared = load_layer(spec, load, index, attention), spec.layers[index].block
        if shared is None:
            layers.append(layer)
        else:
            assert attention is not None
            layers.append(load_shared_layer(spec, load, index, blocks[shared.number], attention, layer))
    return layers


def load_layer(spec: ModelSpec, load: LinearLoader, index: int, attention: Attention[Any] | None) -> DecoderLayer:
    """Load layer `index`, without its shared block. Raises ModelError."""
    layer: LayerSpec = spec.layers[index]
    prefix = f"layers.{index}."
    mixing = _load_mixing(spec, load, index, attention)
    mlp: Mlp | MoeMlp | None = None
    if layer.moe is not None:
        mlp = load_moe(spec, layer.moe, load, prefix)
    elif layer.has_mlp and layer.block is None:
        mlp = load_mlp(spec, load, prefix, spec.ffn_size)

    def norm(name: str) -> Norm | None:
        key = prefix + name
        return load_norm(spec, load, key) if key in load.source else None

    norms = LayerNorms(norm("attn_norm"), norm("mlp_norm"), norm("attn_post_norm"), norm("mlp_post_norm"))
    return DecoderLayer(spec, layer, mixing, mlp, norms, load.backend.ops)


def _load_mixing(spec: ModelSpec, load: LinearLoader, index: int, attention: Attention[Any] | None) -> Mixing | None:
    """Load what mixes the rows of layer `index`; None if it is an MLP alone."""
    layer = spec.layers[index]
    mixer = None if layer.mixer is None else load_mixer(spec, layer.mixer, load, index)
    if not layer.attends or layer.block is not None:
        return mixer
    assert attention is not None
    places = StepPlaces.of(spec, index)
    if spec.latent is not None:
        return load_latent_attention(spec, load, index, attention, places)
    attending = load_attention(spec, load, index, attention, places)
    if mixer is None:
        return attending
    return ParallelMixer(attending, mixer, (spec.attention_factor, spec.mixer_factor))
