"""Predicts a model's memory on a rank from its spec, before a tensor is read. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from services.compute.backends import kv_formats
from services.compute.cpu import has_amx, has_vectors
from services.compute.model.layout import Layout
from services.compute.model.quantization import rounding_of
from services.compute.model.spec import IntegerPart, LayerSpec, ModelSpec, SharedBlock
from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.memory import MemoryAccount, worker_account

_MIB = 1 << 20
_FLOAT = 4
_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VOCABULARY_ALIGNMENT = 16  # vector registers of float32; also keeps every rank's slice equally long
# A rank before it loads the model: Python, torch, the kernels and their threads. Measured on CPUs: 145 to 165 MiB.
_PROCESS = 176 * _MIB
# The allocator's reserve (MALLOC_TOP_PAD_) and the rest of the warm-up.
_RESERVE = 64 * _MIB

_SNAPSHOT_BYTES = 256 * _MIB  # a rank's, for states that prefixes are continued from
_MOST_SNAPSHOTS = 1024


@dataclass(frozen=True, slots=True)
class Footprint:
    """Predicted memory of each of `ranks` ranks."""

    ranks: int
    fixed: MemoryAccount  # a rank's, without its KV cache
    kv_token: int  # bytes of a token in the KV cache, over all layers
    kv_format: str

    @property
    def later(self) -> int:
        """Bytes of a serving rank besides its KV cache."""
        return self.fixed.workspace + self.fixed.adapters + self.fixed.states

    def on_rank(self, kv_tokens: int) -> MemoryAccount:
        """The account of a rank with a cache of `kv_tokens`."""
        return replace(self.fixed, kv=self.kv_token * kv_tokens)

    def of_worker(self, kv_tokens: int, host_cache: int = 0) -> MemoryAccount:
        """The account of all ranks, the server, torchrun and a host tier of `host_cache` bytes."""
        on_ranks = sum([self.on_rank(kv_tokens)] * self.ranks, start=MemoryAccount())
        return worker_account(on_ranks, self.ranks, host_cache)


def footprint(spec: ModelSpec, config: RankGroupConfig) -> Footprint:
    """Return the predicted memory of each rank of a group."""
    ranks, itemsize = config.ranks, _ITEM_SIZES[config.dtype]
    kv_format = config.kv_format or config.dtype
    n_kv = spec.kv_heads_per_rank(ranks)
    qkv = (spec.n_heads // ranks + 2 * n_kv) * spec.head_dim
    ffn = max((_ffn_columns(spec, layer, ranks) for layer in spec.layers), default=0)
    mixed = max((layer.mixer.columns(ranks) for layer in spec.layers if layer.mixer is not None), default=0)
    qkv = max(qkv, mixed)
    row = 5 * spec.hidden_size + 2 * qkv + 3 * ffn  # residual, norm, projections, attention, gate and up, their product
    row += 7 * spec.hidden_size if spec.n_blocks else 0  # the embedding, a block's inputs and its results
    logits = config.max_running * local_vocabulary(spec.vocab_size, ranks) * _FLOAT
    n_rows = max(config.max_batched_tokens, config.max_running)
    of_tables = table_elements(spec, ranks, two_tables=_keeps_two_tables(config))
    of_layers = matrix_elements(spec, ranks, two_tables=False) - table_elements(spec, ranks, two_tables=False)
    layer_bytes, table_bytes = _element_bytes(spec, config)
    weights = math.ceil(of_layers * layer_bytes + of_tables * table_bytes)
    of_token = kv_formats.token_bytes(kv_format, n_kv, spec.head_dim)  # in a layer
    if config.page_summaries:  # two rows for the keys of a block
        of_token += math.ceil(2 * n_kv * spec.head_dim * itemsize / config.block_tokens)
    fixed = MemoryAccount(
        process=_PROCESS,
        weights=weights + _tables(spec, itemsize, config.max_model_len),
        images=tower_elements(spec) * itemsize,
        workspace=n_rows * row * itemsize + 2 * logits + _tower_workspace(spec, itemsize) + _RESERVE,
        states=config.state_rows * spec.state(ranks).row_bytes(itemsize),
        adapters=adapter_bytes(spec, config, itemsize),
    )
    return Footprint(ranks, fixed, 0 if spec.bidirectional else spec.n_attending * of_token, kv_format)


def tower_elements(spec: ModelSpec) -> int:
    """Return the number of elements of the vision tower, which every rank has in full; 0 without one."""
    if (vision := spec.vision) is None:
        return 0
    hidden = vision.hidden_size
    if not vision.frame_size:
        layer, merged = hidden * (4 * hidden + (3 if vision.window else 2) * vision.ffn_size), hidden * vision.square**2
        tables = hidden * (6 * vision.patch_size**2 + vision.table_side**2)
        mergers = (1 + len(vision.deep_layers)) * merged * (merged + spec.hidden_size)
        return vision.n_layers * layer + tables + mergers
    layer = hidden * (4 * hidden + 2 * vision.ffn_size)
    tables = hidden * (3 * vision.patch_size**2 + vision.frame_patches)
    projection = hidden * spec.hidden_size * (1 if vision.mean_norm else vision.square**2)
    return vision.n_layers * layer + tables + projection


def _tower_workspace(spec: ModelSpec, itemsize: int) -> int:
    """Return the tower's bytes: pixels in plans and as floats, and residual, norm, projections and MLP of a frame.

    One more frame has its residual there, between two of the steps that share its layers.
    """
    if (vision := spec.vision) is None:
        return 0
    row = (7 if vision.frame_size else 10) * vision.hidden_size + 2 * vision.ffn_size
    row += 2 * len(vision.deep_layers) * spec.hidden_size // vision.square**2
    return 5 * vision.frame_bytes * _FLOAT + vision.frame_patches * row * itemsize


def _keeps_two_tables(config: RankGroupConfig) -> bool:
    """Whether a tied embedding is in memory twice, because oneDNN packs the head."""
    return config.device == "cpu" and (config.dtype != "bfloat16" or not (has_amx() or has_vectors()))


def _element_bytes(spec: ModelSpec, config: RankGroupConfig) -> tuple[float, float]:
    """Return the bytes of an element of a layer's matrices and of the vocabulary's."""
    dense = float(_ITEM_SIZES[config.dtype])
    if config.device != "cpu" or config.dtype != "bfloat16" or not (has_amx() or has_vectors()):
        return dense, dense  # only our kernels multiply integers
    rounded = [rounding_of(config.quantization, key) for key in ("layers.0.q", "head")]
    layer, table = (dense if rounding is None else rounding.element_bytes for rounding in rounded)
    if spec.quantization:
        layer = max(_stored_bytes(layout, dense) for layout in spec.quantization)
    return _mean_bytes(spec.in_layers, layer), _mean_bytes(spec.in_tables, table)


def _mean_bytes(part: IntegerPart | None, others: float) -> float:
    """Return the mean bytes of an element of matrices with an integer part; `others` is that of the rest."""
    return others if part is None else part.share * part.element_bytes + (1 - part.share) * others


def _stored_bytes(layout: Layout, dense: float) -> float:
    """Return the bytes of an element that is kept as it is stored, or dense if it is a float."""
    codes, group = layout.codes, layout.scales.block[1]
    if any(dtype.startswith("F") for dtype in codes.dtypes):
        return dense
    bits = 8 if codes.packing is None or layout.microscaled else codes.packing.bits
    stored_bits = next(size for size in (2, 4, 8) if size >= bits)
    numbers = 1 if layout.zeros is None else 2  # numbers per group: a scale, and an offset in place of a zero
    return stored_bits / 8 + (numbers * _FLOAT / group if group else 0)


def local_vocabulary(vocab_size: int, ranks: int) -> int:
    """Return the length of each rank's slice of the vocabulary: equal on all, a multiple of a vector register."""
    return -(-vocab_size // (ranks * _VOCABULARY_ALIGNMENT)) * _VOCABULARY_ALIGNMENT


def matrix_elements(spec: ModelSpec, ranks: int, *, two_tables: bool) -> int:
    """Return the number of elements of a rank's matrices. Vectors are too small to matter."""
    total = sum(layer.mixer.elements(spec.hidden_size, ranks) for layer in spec.layers if layer.mixer is not None)
    total += sum(_own_elements(spec, layer.block, ranks) for layer in spec.layers if layer.block is not None)
    products = 3 if spec.mlp == "gated" else 2
    for layer in spec.unshared:
        total += _attention_elements(spec, ranks) if layer.attends else 0
        if not layer.has_mlp:
            continue
        if layer.moe is not None:
            columns = layer.moe.n_experts // ranks * layer.moe.ffn_size + layer.moe.shared_size // ranks
            total += spec.hidden_size * (layer.moe.n_experts + layer.moe.shared_gate + products * columns)
        else:
            total += spec.hidden_size * products * _ffn_columns(spec, layer, ranks)
    return total + table_elements(spec, ranks, two_tables=two_tables)


def _attention_elements(spec: ModelSpec, ranks: int) -> int:
    hidden, n_heads = spec.hidden_size, spec.n_heads // ranks
    if (latent := spec.latent) is None:
        read = n_heads + 2 * spec.kv_heads_per_rank(ranks) + n_heads * spec.attention_gate  # q, k, v
        return (spec.attention_width * read + hidden * n_heads) * spec.head_dim
    query_rank = latent.query_rank
    queries = query_rank * hidden + n_heads * latent.query_dim * (query_rank or hidden)
    keys = (latent.rank + latent.rope_dim) * hidden + n_heads * latent.expanded_dim * latent.rank
    return queries + keys + n_heads * latent.value_dim * hidden


def _own_elements(spec: ModelSpec, block: SharedBlock, ranks: int) -> int:
    """Return the elements of what a layer has besides a shared block and its mixer."""
    hidden, outputs = spec.hidden_size, (spec.n_heads // ranks + 2 * spec.kv_heads_per_rank(ranks)) * spec.head_dim
    attention = block.attention_rank * (3 * spec.attention_width + outputs)
    return attention + block.rank * (hidden + 2 * spec.ffn_size // ranks) + hidden * hidden


def table_elements(spec: ModelSpec, ranks: int, *, two_tables: bool) -> int:
    """Return the number of elements of a rank's embedding and head."""
    tables = 1 if spec.bidirectional or (spec.tied and not two_tables) else 2
    return tables * local_vocabulary(spec.vocab_size, ranks) * spec.hidden_size


def snapshot_rows(spec: ModelSpec, ranks: int, dtype: str) -> int:
    """Return how many snapshots of states a rank keeps for the prefix cache; 0 if one takes too much memory."""
    row_bytes = spec.state(ranks).row_bytes(_ITEM_SIZES[dtype])
    return min(_MOST_SNAPSHOTS, _SNAPSHOT_BYTES // row_bytes) if row_bytes else 0


def _ffn_columns(spec: ModelSpec, layer: LayerSpec, ranks: int) -> int:
    return spec.ffn_size // ranks if layer.moe is None else layer.moe.ffn_size


def _tables(spec: ModelSpec, itemsize: int, max_positions: int) -> int:
    """Return the bytes of the tables by position: cos and sin of each rope, learned embeddings."""
    ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
    turned = sum(rope.rotary_dim for rope in ropes) * _FLOAT
    learned = spec.hidden_size * itemsize if spec.learned_positions else 0
    return max_positions * (turned + learned)


def adapter_bytes(spec: ModelSpec, config: RankGroupConfig, itemsize: int) -> int:
    """Return the bytes on a rank's device once every slot holds an adapter of the largest rank, and the cache is full.

    An adapter is in float32 in the cache, which is the host's memory, and in numbers of `itemsize` bytes in its slot.
    """
    if not config.adapter_slots:
        return 0
    numbers = config.adapter_max_rank * factor_elements(spec, config.ranks)
    in_slots = config.adapter_slots * numbers * itemsize
    if config.device != "cpu":
        return in_slots
    # One that is loaded is in the cache, unless it does not fit there.
    loading = numbers * _FLOAT if numbers * _FLOAT > config.adapter_cache_bytes else 0
    return in_slots + config.adapter_cache_bytes + loading


def factor_elements(spec: ModelSpec, ranks: int) -> int:
    """Return the numbers of an adapter of rank 1 on all layers that can be adapted, on one of `ranks` ranks."""
    products = (layer.mixer.products(spec.hidden_size, ranks) for layer in spec.layers if layer.mixer is not None)
    total = sum(n_in + n_out for of_layer in products for n_in, n_out in of_layer)
    for layer in spec.unshared:
        total += _factors_of_attention(spec, ranks) if layer.attends else 0
        if not layer.has_mlp:
            continue
        columns = spec.ffn_size if layer.moe is None else layer.moe.shared_size
        if columns:
            inner = (2 if spec.mlp == "gated" else 1) * (spec.hidden_size + columns // ranks)
            total += inner + columns // ranks + spec.hidden_size
    return total


def _factors_of_attention(spec: ModelSpec, ranks: int) -> int:
    hidden, n_heads = spec.hidden_size, spec.n_heads // ranks
    if (latent := spec.latent) is not None:
        return (latent.query_rank or hidden) + n_heads * (latent.query_dim + latent.value_dim) + hidden
    queries, keys = n_heads * spec.head_dim, spec.kv_heads_per_rank(ranks) * spec.head_dim
    width = spec.attention_width
    gate = hidden + queries if spec.attention_gate else 0
    return (width + queries) + 2 * (width + keys) + (queries + hidden) + gate
