"""Usage of requests, and its costs."""

from __future__ import annotations

from charts.tools.dashboards.grafana import INTERVAL, Dashboard, graph, rate, runbook, stat

_MODEL = 'model=~"$model"'
_TOKENS, _COST = "ryzanstein_gateway_tokens_total", "ryzanstein_gateway_cost_total"
_PROMPT, _CACHED = ',kind="prompt"', ',kind="cached"'
_DAY = "24h"
_CURRENCY = "In the currency of the prices; nothing where no model has a price."
_MINUTE = "Ten largest, tokens a second. `ryzanstein usage` has exact sums, by key as well."
_GENERATED = 'kind="completion"'
_JOULES = f"sum (rate(ryzanstein_worker_energy_joules_total{{@}}[{INTERVAL}]))"
_POWER = f"sum by (instance, device) (rate(ryzanstein_worker_energy_joules_total{{@}}[{INTERVAL}]))"


def _of_a_day(metric: str, by: str = "", where: str = "") -> str:
    """A counter's growth in a day, summed by labels."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (increase({metric}{{@,{_MODEL}{where}}}[{_DAY}]))"


DASHBOARD = Dashboard(
    uid="rz-usage",
    title="Usage and costs",
    filters=(("model", "model", "ryzanstein_gateway_requests_total"),),
    rows=(
        (
            "The last 24 hours",
            (
                stat(
                    "Tokens",
                    "short",
                    (_of_a_day(_TOKENS, "kind"), "{{kind}}"),
                    about="Cached tokens are a part of the prompts'.",
                ),
                stat("Cost", "short", (_of_a_day(_COST), "cost"), about=_CURRENCY),
                stat(
                    "Cached part of prompts",
                    "percentunit",
                    (f"{_of_a_day(_TOKENS, where=_CACHED)} / {_of_a_day(_TOKENS, where=_PROMPT)}", "cached"),
                    about="Tokens of prompts that no worker computed again.",
                ),
            ),
        ),
        (
            "Tokens",
            (
                graph("By kind", "short", (rate(_TOKENS, "kind", _MODEL), "{{kind}}"), about="Tokens a second."),
                graph(
                    "By tenant", "short", (f"topk(10, {rate(_TOKENS, 'tenant', _MODEL)})", "{{tenant}}"), about=_MINUTE
                ),
                graph("By model", "short", (f"topk(10, {rate(_TOKENS, 'model', _MODEL)})", "{{model}}"), about=_MINUTE),
            ),
        ),
        (
            "Costs, limits, energy",
            (
                graph(
                    "Cost by tenant",
                    "short",
                    (f"topk(10, 3600 * {rate(_COST, 'tenant', _MODEL)})", "{{tenant}}"),
                    about="Ten largest, an hour. " + _CURRENCY,
                ),
                graph(
                    "Cost by model",
                    "short",
                    (f"topk(10, 3600 * {rate(_COST, 'model', _MODEL)})", "{{model}}"),
                    about="Ten largest, an hour. " + _CURRENCY,
                ),
                graph(
                    "Refused by quota or budget",
                    "reqps",
                    (
                        rate("ryzanstein_gateway_limited_total", "limit", 'limit=~"quota|budget"') + " or vector(0)",
                        "{{limit}}",
                    ),
                    about="Of the tenant's key.",
                ),
                graph(
                    "Usage that Redis does not have",
                    "short",
                    ("sum (ryzanstein_gateway_usage_waiting_tokens{@})", "tokens that wait"),
                    (rate("ryzanstein_gateway_unaccounted_tokens_total"), "tokens lost/s"),
                    (rate("ryzanstein_gateway_unlogged_requests_total"), "requests/s that the log for plans lacks"),
                    about="Redis is or was away. " + runbook("redis-lost"),
                ),
                graph(
                    "Power",
                    "watt",
                    (_POWER, "{{instance}} {{device}}"),
                    about="Where the kernel (RAPL) or NVML counts it, for all that runs on a worker's machine.",
                ),
                graph(
                    "Energy of a generated token",
                    "short",
                    (
                        f"{_JOULES} / " + rate("ryzanstein_worker_generated_tokens_total"),
                        "joules",
                    ),
                    about="Workers of one machine each count all of it: with several on a machine, divide by their number.",
                ),
                graph(
                    "Power by tenant",
                    "watt",
                    (
                        f"topk(10, scalar({_JOULES}) * {rate(_TOKENS, 'tenant', _GENERATED)} / "
                        f"scalar({rate(_TOKENS, where=_GENERATED)}))",
                        "{{tenant}}",
                    ),
                    about="Ten largest, of all models: what the machines use, divided by generated tokens, since one "
                    "step computes several tenants' requests.",
                ),
            ),
        ),
    ),
)
