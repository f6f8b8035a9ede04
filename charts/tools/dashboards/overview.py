"""How clients fare, and whether anything is degraded."""

from __future__ import annotations

from charts.tools.dashboards.grafana import Dashboard, graph, quantiles, rate, runbook, stat, timeline

_MODEL = 'model=~"$model"'

DASHBOARD = Dashboard(
    uid="rz-overview",
    title="Overview",
    filters=(("model", "model", "ryzanstein_router_workers"),),
    rows=(
        (
            "What was promised",
            (
                stat(
                    "Error budget left",
                    "percentunit",
                    (
                        f"clamp_min(1 - ryzanstein:sli_errors:ratio_rate3d{{@,{_MODEL}}} / 0.001, 0)",
                        "{{model}}",
                    ),
                    about="Of 0.1 % failed requests, over three days or as long as Prometheus remembers. "
                    + runbook("error-budget"),
                ),
                graph(
                    "Requests that succeed",
                    "percentunit",
                    (f"1 - ryzanstein:sli_errors:ratio_rate5m{{@,{_MODEL}}}", "{{model}}"),
                    about="5xx over all but 4xx and 499: limits and clients that leave do not count. "
                    + runbook("error-budget"),
                ),
                graph(
                    "First tokens in time",
                    "percentunit",
                    (f"1 - ryzanstein:sli_ttft:ratio_rate5m{{@,{_MODEL}}}", "{{model}}"),
                    about="Share that came within the objective (2.5 s unless the chart sets another one). "
                    + runbook("slow-tokens"),
                ),
            ),
        ),
        (
            "Clients",
            (
                graph(
                    "Requests by status",
                    "reqps",
                    (rate("ryzanstein_gateway_requests_total", "status", _MODEL), "{{status}}"),
                    about="499: the client went away; 429: a limit or full workers; 5xx: ours. " + runbook("overload"),
                    stacked=True,
                ),
                graph(
                    "Time to first token",
                    "s",
                    *quantiles(
                        "ryzanstein_gateway_time_to_first_token_seconds", 0.5, 0.95, 0.99, by="model", where=_MODEL
                    ),
                    about="From a request's arrival. " + runbook("slow-tokens"),
                ),
                graph(
                    "Time between tokens",
                    "s",
                    *quantiles("ryzanstein_gateway_inter_token_seconds", 0.5, 0.99, by="model", where=_MODEL),
                    about="Between batches of one stream. " + runbook("slow-tokens"),
                ),
                graph(
                    "Tokens",
                    "short",
                    (rate("ryzanstein_gateway_tokens_total", "kind", _MODEL), "{{kind}}/s"),
                    (rate("ryzanstein_gateway_mirrored_tokens_total", "kind", _MODEL), "{{kind}}/s, mirrored"),
                    about="Of finished sequences: prompt, completion, and prompt tokens that were cached.",
                ),
                graph(
                    "Requests now",
                    "short",
                    ("sum (ryzanstein_gateway_in_flight_requests{@})", "in flight"),
                    ("sum (ryzanstein_gateway_waiting_sequences{@})", "without a first token"),
                    ("sum (ryzanstein_router_queue_length{@})", "queued in routers"),
                    about="Queued ones found no worker that takes work. " + runbook("overload"),
                ),
                graph(
                    "Pauses that clients saw",
                    "s",
                    *quantiles("ryzanstein_gateway_resume_seconds", 0.5, 0.99),
                    about="In streams that lost their worker and went on elsewhere. " + runbook("worker-down"),
                ),
            ),
        ),
        (
            "The installation",
            (
                graph(
                    "Workers by state",
                    "short",
                    (f"max by (model, state) (ryzanstein_router_workers{{@,{_MODEL}}}) > 0", "{{model}} {{state}}"),
                    about="As routers see them; only eligible ones take work. " + runbook("worker-down"),
                    stacked=True,
                ),
                graph(
                    "Interruptions survived",
                    "ops",
                    (f"{rate('ryzanstein_gateway_resumes_total', 'cause')} or vector(0)", "{{cause}}"),
                    (rate("ryzanstein_gateway_resumed_streams_total", "resume"), "went on, {{resume}}"),
                    about="Streams moved to another worker; drain, overload and loading are ordinary. Those that went on "
                    "approximate may have another text. " + runbook("worker-down"),
                ),
                graph(
                    "Streams broken",
                    "ops",
                    (f"{rate('ryzanstein_gateway_streams_broken_total', 'reason')} or vector(0)", "{{reason}}"),
                    about="Ended with an error after their first token: clients saw these. " + runbook("error-budget"),
                ),
                graph(
                    "Canaries",
                    "short",
                    (
                        "sum by (route, decision) (ryzanstein_gateway_canary_decisions_total{@}) or vector(0)",
                        "{{route}}: {{decision}}",
                    ),
                    about="Decisions since the gateways started: steps, promotions, rollbacks, and canaries that were stopped. "
                    + runbook("canaries"),
                ),
                timeline(
                    "Everything there",
                    ("min (ryzanstein_gateway_redis_up{@})", "Redis, for gateways"),
                    ("min (ryzanstein_router_redis_up{@})", "Redis, for routers"),
                    ("min (ryzanstein_gateway_router_up{@})", "routers, for gateways"),
                    about="Without any of them requests are still served. " + runbook("redis-lost"),
                ),
                stat(
                    "Alerts firing",
                    "short",
                    (
                        'count by (alertname) (ALERTS{alertstate="firing",alertname=~"Ryzanstein.*"}) or vector(0)',
                        "{{alertname}}",
                    ),
                    about="Each has a [runbook](" + runbook("README").split("(")[1].removesuffix(").") + ").",
                ),
                stat(
                    "What runs",
                    "short",
                    ("count by (service, version) (ryzanstein_build_info{@})", "{{service}} {{version}}"),
                    about="Processes by service and version. " + runbook("upgrade-stuck"),
                ),
            ),
        ),
    ),
)
