"""Multi-head latent attention: the cache holds one latent for all heads."""

from __future__ import annotations

from typing import Any

import torch

from services.compute.backends.base import Attention, Norm, PerHead, Step
from services.compute.backends.batch import AdapterRows
from services.compute.model.layers.adapters import AdaptedLinear
from services.compute.model.layers.attention import StepPlaces
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import LatentSpec, ModelSpec

_EPS = 1e-6  # epsilon of the latents' norms, independent of the config's


class LatentAttention:
    """Projects, rotates, caches and attends. The result is this rank's summand.

    The one head of the cache is the rotated key, then the latent. The value is the same again, of which the latent's
    part is used: caches and kernels know values of the keys' length only.
    """

    def __init__(
        self,
        sizes: LatentSpec,
        query: LatentQuery,
        latent: AdaptedLinear,
        latent_norm: Norm,
        absorb: PerHead,
        expand: PerHead,
        o: AdaptedLinear,
        attention: Attention[Any],
        places: StepPlaces,
    ) -> None:
        """`absorb`: [n, n_heads, nope_dim] -> [n, n_heads, rank]; `expand`: [n, n_heads, rank] -> [.., value_dim]."""
        self._index, self._sizes, self._query = places.cached, sizes, query
        self._latent, self._latent_norm, self._absorb, self._expand, self._o = latent, latent_norm, absorb, expand, o
        self._attention, self._places = attention, places

    def project(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Write the rows' latents to the cache; return their queries, [n_rows, n_heads * head_dim]."""
        sizes = self._sizes
        queries = self._query(x, step.adapters).view(len(x), -1, sizes.query_dim)
        stored = self._latent(x)  # [n_rows, rank + rope_dim]
        heads = x.new_empty(len(x), queries.shape[1] + 1, sizes.rope_dim + sizes.rank)
        heads[:, :-1, : sizes.rope_dim] = queries[..., sizes.nope_dim :]
        heads[:, -1, : sizes.rope_dim] = stored[:, sizes.rank :]
        if self._places.rotation is not None:
            step.rotations[self._places.rotation](heads)
        heads[:, :-1, sizes.rope_dim :] = self._absorb(queries[..., : sizes.nope_dim].contiguous())
        heads[:, -1, sizes.rope_dim :] = self._latent_norm(stored[:, : sizes.rank].contiguous())
        slots = step.batch.kv_slots
        keys = heads[: len(slots), -1]
        step.cache.store(self._index, slots, torch.cat((keys, keys), dim=-1))
        return heads[:, :-1].flatten(1)

    def attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attend with the rows' queries; returns [n_rows, hidden_size], to be summed over the ranks."""
        sizes = self._sizes
        attended = self._attention.attend(q, step.cache, self._index, step.plans[self._places.plan])
        latents = attended.view(len(attended), -1, sizes.rope_dim + sizes.rank)[..., sizes.rope_dim :].contiguous()
        return self._o(self._expand(latents).flatten(1), step.adapters)


class LatentQuery:
    """The queries of this rank's heads, products of the row or of its latent."""

    def __init__(self, latent: AdaptedLinear | None, norm: Norm | None, heads: AdaptedLinear) -> None:
        self._latent, self._norm, self._heads = latent, norm, heads

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        """Return [n, n_heads * query_dim] of [n, hidden_size]."""
        if self._latent is None or self._norm is None:
            return self._heads(x, adapters)
        return self._heads(self._norm(self._latent(x)), adapters)


def load_latent_attention(
    spec: ModelSpec, load: LinearLoader, index: int, attention: Attention[Any], places: StepPlaces
) -> LatentAttention:
    """Load layer `index`'s attention. Raises ModelError."""
    sizes, key, ops = spec.latent, f"layers.{index}.", load.backend.ops
    assert sizes is not None
    latent = load.replicated(f"{key}kv_latent", sizes.rank + sizes.rope_dim, spec.hidden_size)
    norm = ops.rms_norm(_norm_weight(load, f"{key}kv_latent_norm", sizes.rank), _EPS)
    of_keys, of_values = _expansions(spec, sizes, load, f"{key}kv_heads")
    return LatentAttention(
        sizes,
        _load_query(spec, sizes, load, key),
        latent,
        norm,
        ops.per_head(of_keys.mT),
        ops.per_head(of_values),
        load.row_parallel(f"{key}o", spec.hidden_size, spec.n_heads * sizes.value_dim),
        attention,
        places,
    )


def _load_query(spec: ModelSpec, sizes: LatentSpec, load: LinearLoader, key: str) -> LatentQuery:
    n_out = spec.n_heads * sizes.query_dim
    if not sizes.query_rank:
        return LatentQuery(None, None, load.column_parallel([f"{key}q"], n_out, spec.hidden_size))
    latent = load.replicated(f"{key}q_latent", sizes.query_rank, spec.hidden_size)
    norm = load.backend.ops.rms_norm(_norm_weight(load, f"{key}q_latent_norm", sizes.query_rank), _EPS)
    return LatentQuery(latent, norm, load.column_parallel([f"{key}q"], n_out, sizes.query_rank))


def _norm_weight(load: LinearLoader, key: str, size: int) -> torch.Tensor:
    return load.source.vector(key, size).to(load.backend.device).float()


def _expansions(spec: ModelSpec, sizes: LatentSpec, load: LinearLoader, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices of this rank's keys [n_heads, nope_dim, rank] and values [n_heads, value_dim, rank]."""
    shape = (spec.n_heads * sizes.expanded_dim, sizes.rank)
    stored = load.weight([Shard(key, shape, load.share(shape[0]), Span(0, sizes.rank))])
    dense = stored.dense(load.backend.dtype, load.backend.device).view(-1, sizes.expanded_dim, sizes.rank)
    return dense[:, : sizes.nope_dim], dense[:, sizes.nope_dim :]
