"""Our series and span attributes under the names of other tools: vLLM's `vllm:*` and OpenTelemetry's `gen_ai.*`.

Sources: vLLM's page "Production metrics", and OpenTelemetry's semantic conventions for generative AI. In a scrape
OpenTelemetry's names are written as its specification for Prometheus says: with underscores and the unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

Scheme = Literal["vllm", "gen_ai"]
AttributeValue = str | bool | int | float | tuple[str, ...]

_GATEWAY, _WORKER, _INFO = "ryzanstein_gateway_", "ryzanstein_worker_", "ryzanstein_worker_info"
_PROVIDER = {"gen_ai_provider_name": "ryzanstein"}
# Conventions require an operation; series that do not tell chats from completions have the one that comprises both.
_GENERATION = _PROVIDER | {"gen_ai_operation_name": "generate_content"}

# gen_ai.operation.name by the route that our metrics and spans name; other routes are no such operations.
OPERATIONS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages", "chat", "Chat"), "chat")
    | dict.fromkeys(("/v1/completions", "completion", "Generate"), "text_completion")
    | dict.fromkeys(("/v1/embeddings", "Embed"), "embeddings")
)


@dataclass(frozen=True, slots=True)
class NamedSeries:
    """A series of another tool, and the series of ours that it is made of: (`source` + `plus`) / `over`."""

    name: str
    source: str
    plus: str = ""
    over: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)  # its labels besides the model's, with constant values
    copied: Mapping[str, str] = field(default_factory=dict)  # label of ours -> its label
    where: Mapping[str, str] = field(default_factory=dict)  # label of ours -> the only value of it that counts
    operation: str = ""  # label with the operation that follows from our label `route`

    @property
    def scheme(self) -> Scheme:
        """The tool whose name it is."""
        return "vllm" if self.name.startswith("vllm:") else "gen_ai"

    @property
    def formula(self) -> str:
        """Its source as a formula, for people."""
        where = "".join(f', `{label}` "{value}"' for label, value in self.where.items())
        total = f"`{self.source}`{where}" + (f" + `{self.plus}`" if self.plus else "")
        return f"{total} / `{self.over}`" if self.over else total


def _vllm(name: str, source: str, plus: str = "", over: str = "", **copied: str) -> NamedSeries:
    return NamedSeries(f"vllm:{name}", source, plus, over, copied={"model": "model_name", **copied})


def _tokens(name: str, kind: str) -> NamedSeries:
    return NamedSeries(f"vllm:{name}", f"{_GATEWAY}tokens", copied={"model": "model_name"}, where={"kind": kind})


def _gen_ai(name: str, source: str, **labels: str) -> NamedSeries:
    fixed = _GENERATION | {f"gen_ai_{label}": value for label, value in labels.items()}
    return NamedSeries(f"gen_ai_{name}", source, labels=fixed, copied={"model": "gen_ai_request_model"})


def _duration(name: str) -> NamedSeries:
    return NamedSeries(
        f"gen_ai_{name}",
        f"{_GATEWAY}request_seconds",
        labels=_PROVIDER,
        copied={"model": "gen_ai_request_model"},
        operation="gen_ai_operation_name",
    )


SERIES: tuple[NamedSeries, ...] = (
    _vllm("num_requests_running", f"{_WORKER}running"),
    _vllm("num_requests_waiting", f"{_WORKER}waiting"),
    *(
        _vllm(name, f"{_WORKER}kv_blocks_used", over=f"{_WORKER}kv_blocks_capacity")
        for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc")
    ),
    _vllm("prefix_cache_queries", f"{_WORKER}prefix_hit_tokens", f"{_WORKER}prefill_tokens"),
    _vllm("prefix_cache_hits", f"{_WORKER}prefix_hit_tokens"),
    _vllm("num_preemptions", f"{_WORKER}preemptions"),
    _vllm("iteration_tokens_total", f"{_WORKER}step_rows"),
    _vllm("request_queue_time_seconds", f"{_WORKER}queue_seconds"),
    _vllm("time_to_first_token_seconds", f"{_GATEWAY}time_to_first_token_seconds"),
    *(
        _vllm(name, f"{_GATEWAY}inter_token_seconds")
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds")
    ),
    _vllm("e2e_request_latency_seconds", f"{_GATEWAY}request_seconds"),
    _tokens("prompt_tokens", "prompt"),
    _tokens("generation_tokens", "completion"),
    _vllm("request_prompt_tokens", f"{_GATEWAY}prompt_length_tokens"),
    _vllm("request_generation_tokens", f"{_GATEWAY}completion_length_tokens"),
    _vllm("request_success", f"{_GATEWAY}sequences", finish="finished_reason"),
    _duration("server_request_duration_seconds"),
    _duration("client_operation_duration_seconds"),
    _gen_ai("server_time_to_first_token_seconds", f"{_GATEWAY}time_to_first_token_seconds"),
    _gen_ai("server_time_per_output_token_seconds", f"{_GATEWAY}inter_token_seconds"),
    _gen_ai("client_token_usage", f"{_GATEWAY}prompt_length_tokens", token_type="input"),
    _gen_ai("client_token_usage", f"{_GATEWAY}completion_length_tokens", token_type="output"),
)

# Attribute of our spans -> OpenTelemetry's.
ATTRIBUTES: Mapping[str, str] = MappingProxyType(
    {
        "ryzanstein.requested_model": "gen_ai.request.model",
        "ryzanstein.max_tokens": "gen_ai.request.max_tokens",
        "ryzanstein.temperature": "gen_ai.request.temperature",
        "ryzanstein.top_p": "gen_ai.request.top_p",
        "ryzanstein.top_k": "gen_ai.request.top_k",
        "ryzanstein.frequency_penalty": "gen_ai.request.frequency_penalty",
        "ryzanstein.presence_penalty": "gen_ai.request.presence_penalty",
        "ryzanstein.choices": "gen_ai.request.choice.count",
        "ryzanstein.model": "gen_ai.response.model",
        "ryzanstein.generation_id": "gen_ai.response.id",
        "ryzanstein.finish_reasons": "gen_ai.response.finish_reasons",
        "ryzanstein.prompt_tokens": "gen_ai.usage.input_tokens",
        "ryzanstein.cached_tokens": "gen_ai.usage.cache_read.input_tokens",
        "ryzanstein.completion_tokens": "gen_ai.usage.output_tokens",
    }
)


def gen_ai_attributes(route: str, ours: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """OpenTelemetry's attributes of a request's span; none for a route that is no operation of a model."""
    if route not in OPERATIONS:
        return {}
    named = {theirs: ours[name] for name, theirs in ATTRIBUTES.items() if ours.get(name) not in (None, "")}
    return named | {"gen_ai.operation.name": OPERATIONS[route], "gen_ai.provider.name": "ryzanstein"}


class NamingRegistry(CollectorRegistry):
    """A registry that also exports its series under the names of other tools."""

    def __init__(self, schemes: Collection[Scheme]) -> None:
        super().__init__()
        self._series = tuple(series for series in SERIES if series.scheme in schemes)

    def collect(self) -> Iterator[Metric]:
        """All families, and those of other tools made of the same values."""
        families = list(super().collect())
        yield from families
        yield from named_families(families, self._series)


def named_families(families: Iterable[Metric], series: Iterable[NamedSeries]) -> list[Metric]:
    """The families of `series` for which `families` has values. Labels that they lack are summed over."""
    by_name = {family.name: family for family in families}
    info = by_name.get(_INFO)
    model = info.samples[0].labels["model"] if info and info.samples else ""  # a worker's other series do not name it
    made: dict[str, Metric] = {}
    for each in series:
        source = by_name.get(each.source)
        if source is None:
            continue
        values = _values(each, source, model)
        if each.plus:
            for key, value in _values(each, by_name[each.plus], model).items():
                values[key] = values.get(key, 0.0) + value
        if each.over:
            totals = _values(each, by_name[each.over], model)
            values = {key: value / totals[key] if totals[key] else 0.0 for key, value in values.items()}
        family = made.setdefault(each.name, Metric(each.name, f"Made of {each.formula}", source.type))
        family.samples += [
            Sample(f"{each.name}{suffix}", dict(labels), value) for (suffix, labels), value in values.items()
        ]
    return list(made.values())


_Key = tuple[str, tuple[tuple[str, str], ...]]  # suffix of the sample's name, its labels


def _values(series: NamedSeries, family: Metric, model: str) -> dict[_Key, float]:
    values: dict[_Key, float] = {}
    for sample in family.samples:
        labels = _labels(series, {"model": model} | sample.labels)
        if labels is not None:
            key = sample.name.removeprefix(family.name), tuple(labels.items())
            values[key] = values.get(key, 0.0) + sample.value
    return values


def _labels(series: NamedSeries, ours: Mapping[str, str]) -> dict[str, str] | None:
    """Labels of a sample; None for one that does not count: without a model, or of a route that is no operation."""
    counts = all(ours[label] == value for label, value in series.where.items())
    if not ours["model"] or not counts or (series.operation and ours["route"] not in OPERATIONS):
        return None
    labels = {theirs: ours[name] for name, theirs in series.copied.items()} | dict(series.labels)
    if series.operation:
        labels[series.operation] = OPERATIONS[ours["route"]]
    return labels | {"le": ours["le"]} if "le" in ours else labels
