"""The attention block of a layer: projections, positions, cache, attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.compute.backends.base import Attention, Norm, RmsNorm, Step
from services.compute.backends.collectives import Communicator
from services.compute.backends.recurrent import GatedNorm
from services.compute.model.layers.adapters import Product
from services.compute.model.layers.embedding import pad_rows
from services.compute.model.layers.linear import LinearLoader
from services.compute.model.layers.norm import load_divided_norm
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows that the last layer computes completely; for other rows it computes only keys and values."""

    rows: torch.Tensor  # [n_wanted] int64, indices of the step's rows
    step: Step  # a step of only these rows
    n_rows: int  # n_wanted, or more with zero rows as padding

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n_rows, size] of x [n, size]."""
        return pad_rows(x.index_select(0, self.rows), self.n_rows)


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """Indices of a layer's part of what all layers share in a step."""

    cached: int  # the layer's number in the cache, which has only layers with attention
    plan: int  # index into the step's plans
    rotation: int | None  # the layer's rope, an index into the step's rotations
    scaling: int | None  # the scale of its queries, an index into the step's rotations

    @classmethod
    def of(cls, spec: ModelSpec, index: int) -> StepPlaces:
        """Return the places of layer `index`, which attends."""
        layer = spec.layers[index]
        return cls(
            sum(one.attends for one in spec.layers[:index]),
            spec.reaches.index(layer.reach),
            None if layer.rope is None else spec.ropes.index(layer.rope),
            None if layer.query_scale is None else len(spec.ropes) + spec.query_scales.index(layer.query_scale),
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """This rank's heads, as spans of the stored heads."""

    head_dim: int
    q: Span
    kv: Span

    @classmethod
    def of_rank(cls, spec: ModelSpec, comm: Communicator) -> Heads:
        """Return the share of a rank; ranks share KV heads if there are fewer KV heads than ranks."""
        n_kv = spec.kv_heads_per_rank(comm.size)
        n_q = spec.n_heads // comm.size
        first_kv = comm.rank * spec.n_kv_heads // comm.size
        return cls(spec.head_dim, Span(comm.rank * n_q, (comm.rank + 1) * n_q), Span(first_kv, first_kv + n_kv))

    def elements(self, heads: Span) -> Span:
        """Return the span of the heads' elements."""
        return Span(heads.start * self.head_dim, heads.stop * self.head_dim)


class HeadNorm:
    """RMS norm of each q and k head."""

    def __init__(self, norm: RmsNorm) -> None:
        """`norm` has weights [n_q + n_kv, head_dim]."""
        self._norm = norm

    def normalise_(self, qk: torch.Tensor) -> None:
        """Normalise [n, n_q + n_kv, head_dim] in place."""
        self._norm.write(qk, qk)


class FullNorm:
    """RMS norm over all q heads together, and over all k heads, of all ranks."""

    def __init__(
        self, q_weight: torch.Tensor, k_weight: torch.Tensor, heads: Heads, spec: ModelSpec, comm: Communicator
    ) -> None:
        """`q_weight` and `k_weight` are this rank's elements."""
        self._n_q, self._comm, self._eps = len(heads.q), comm, spec.norm_eps
        weight = torch.cat((q_weight, k_weight)).float()
        self._weight = weight.view(-1, heads.head_dim)  # [n_q + n_kv, head_dim]
        copies = comm.size * len(heads.kv) // spec.n_kv_heads  # number of ranks that hold the same KV head
        q_share = 1 / (spec.n_heads * spec.head_dim)
        k_share = 1 / (spec.n_kv_heads * spec.head_dim * copies)
        self._share = torch.tensor([q_share, k_share], device=weight.device)

    def normalise_(self, qk: torch.Tensor) -> None:
        """Normalise [n, n_q + n_kv, head_dim] in place."""
        x = qk.float()
        parts = (x[:, : self._n_q].flatten(1), x[:, self._n_q :].flatten(1))
        lengths = torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in parts], dim=-1)
        mean = self._comm.all_reduce(lengths.square_().mul_(self._share))  # [n, 2]
        scale = torch.rsqrt(mean + self._eps)
        n_kv = x.shape[1] - self._n_q
        per_head = torch.cat((scale[:, :1].expand(-1, self._n_q), scale[:, 1:].expand(-1, n_kv)), dim=1)
        qk.copy_(x * per_head.unsqueeze(-1) * self._weight)


QkNorm = HeadNorm | FullNorm


class AttentionLayer:
    """Projects, rotates, caches and attends. The result is this rank's summand."""

    def __init__(
        self,
        heads: Heads,
        qkv: Product,
        o: Product,
        qk_norm: QkNorm | None,
        norm_last: bool,
        sub_norm: Norm | None,
        gate: GatedNorm | None,
        attention: Attention[Any],
        places: StepPlaces,
    ) -> None:
        """`norm_last`: rotate, then normalise. `sub_norm`: of the results of attention.

        `gate`: of the results, by numbers that `qkv` has before the queries; None: it has none.
        """
        self._gate = gate
        self._index, self._qkv, self._o, self._qk_norm = places.cached, qkv, o, qk_norm
        self._norm_last, self._sub_norm = norm_last, sub_norm
        self._attention, self._plan = attention, places.plan
        self._rotation, self._scaling = places.rotation, places.scaling
        self._n_q = len(heads.q)
        self._n_rotated, self._head_dim = len(heads.q) + len(heads.kv), heads.head_dim
        self._n_gate = 0 if gate is None else len(heads.q)

    @property
    def query_size(self) -> int:
        """Numbers of a row that `project` returns."""
        return (self._n_gate + self._n_q) * self._head_dim

    def project(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Write the rows' keys and values to the cache; return their queries, [n_rows, n_q * head_dim].

        With a gate, its numbers come before the queries.
        """
        qkv = self._qkv(x, step.adapters)  # [n_rows, (n_gate + n_q + 2 n_kv) * head_dim]
        # The view comes before the slice, because otherwise a single row would get another stride.
        qk = qkv.view(len(qkv), -1, self._head_dim)[:, self._n_gate : self._n_gate + self._n_rotated]
        rotation = None if self._rotation is None else step.rotations[self._rotation]
        if self._qk_norm is not None:
            if rotation is not None and self._norm_last:
                rotation(qk)
                rotation = None
            self._qk_norm.normalise_(qk)
        if rotation is not None and self._n_gate:  # the cache would rotate all that comes before the values
            rotation(qk)
            rotation = None
        step.cache.store(self._index, step.batch.kv_slots, qkv, rotation)
        if self._scaling is not None:
            step.rotations[self._scaling](qk[:, : self._n_q])
        return qkv[:, : self.query_size]

    def attend(self, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attend with the rows' queries; returns [n_rows, hidden_size], to be summed over the ranks."""
        plan = step.plans[self._plan]
        gate_size = self._n_gate * self._head_dim
        queries = q[:, gate_size:]
        attended = self._attention.attend(queries, step.cache, self._index, plan)
        if step.frames is not None:
            step.frames.attend(queries, attended, step.cache, self._index, self._plan)
        if self._gate is not None:
            attended = self._gate(attended, q[: len(attended), :gate_size])
        return self._o(attended if self._sub_norm is None else self._sub_norm(attended), step.adapters)


def qkv_shards(spec: ModelSpec, heads: Heads, key: str) -> list[Shard]:
    """Return the rank's parts of the projections to queries, keys and values, whose keys begin with `key`."""
    outputs = (("q", spec.n_heads, heads.q), ("k", spec.n_kv_heads, heads.kv), ("v", spec.n_kv_heads, heads.kv))
    width = spec.attention_width
    return [
        Shard(key + part, (n * spec.head_dim, width), heads.elements(mine), Span(0, width)) for part, n, mine in outputs
    ]


def load_attention(
    spec: ModelSpec, load: LinearLoader, index: int, attention: Attention[Any], places: StepPlaces
) -> AttentionLayer:
    """Load layer `index`'s attention."""
    heads, key, hidden = Heads.of_rank(spec, load.comm), f"layers.{index}.", spec.hidden_size
    q_out = spec.n_heads * spec.head_dim
    shards, gate = qkv_shards(spec, heads, key), None
    if spec.attention_gate:
        of_gate = Shard(f"{key}attention_gate", (q_out, hidden), heads.elements(heads.q), Span(0, hidden))
        shards, gate = [of_gate, *shards], load.backend.ops.gated_norm(None, 1, spec.norm_eps, "plain", "sigmoid")
    qkv = load.build(shards)
    o = load.row_parallel(f"{key}o", hidden, q_out)
    qk_norm = _load_qk_norm(spec, load, index, heads)
    sub_norm = load_divided_norm(load, f"{key}o_norm", q_out, spec.norm_eps) if spec.sub_norm else None
    return AttentionLayer(heads, qkv, o, qk_norm, spec.qk_norm_rotated, sub_norm, gate, attention, places)


def _load_qk_norm(spec: ModelSpec, load: LinearLoader, index: int, heads: Heads) -> QkNorm | None:
    key = f"layers.{index}."
    if spec.qk_norm is None:
        return None
    if spec.qk_norm == "unit":
        ones = torch.ones(len(heads.q) + len(heads.kv), spec.head_dim, device=load.backend.device)
        norm = HeadNorm(load.backend.ops.rms_norm(ones, spec.norm_eps))
        return None if spec.layers[index].rope is None else norm
    if spec.qk_norm == "head":
        q, k = (load.source.vector(f"{key}{part}_norm", spec.head_dim) for part in ("q", "k"))
        q, k = (weight.to(load.backend.device).float() + spec.norm_offset for weight in (q, k))
        weights = torch.stack([q] * len(heads.q) + [k] * len(heads.kv))  # [n_q + n_kv, head_dim]
        return HeadNorm(load.backend.ops.rms_norm(weights, spec.norm_eps))
    q = load.source.vector(f"{key}q_norm", spec.n_heads * spec.head_dim, heads.elements(heads.q))
    k = load.source.vector(f"{key}k_norm", spec.n_kv_heads * spec.head_dim, heads.elements(heads.kv))
    device = load.backend.device
    return FullNorm(q.to(device), k.to(device), heads, spec, load.comm)
