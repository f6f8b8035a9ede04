"""The gateways."""

from __future__ import annotations

from charts.tools.dashboards.grafana import INTERVAL, Dashboard, graph, quantiles, rate, runbook, timeline

_MODEL = 'model=~"$model"'
_GATEWAY = 'component="gateway"'

DASHBOARD = Dashboard(
    uid="rz-gateway",
    title="Gateways",
    filters=(("model", "model", "ryzanstein_gateway_requests_total"),),
    rows=(
        (
            "Requests",
            (
                graph(
                    "By API and route",
                    "reqps",
                    (rate("ryzanstein_gateway_requests_total", "api, route", _MODEL), "{{api}} {{route}}"),
                    (rate("ryzanstein_gateway_sequences_total", "finish", _MODEL), "sequences: {{finish}}"),
                    about="Requests that are over, and sequences of those with a first token, by the reason of their end.",
                ),
                graph(
                    "Time to last byte",
                    "s",
                    *quantiles("ryzanstein_gateway_request_seconds", 0.5, 0.99, by="route", where=_MODEL),
                    about="Longer answers take longer: read it with their length.",
                ),
                graph(
                    "In flight by gateway",
                    "short",
                    ("sum by (instance) (ryzanstein_gateway_in_flight_requests{@})", "{{instance}}"),
                    about="Uneven: the balancer's doing; balance by open connections. " + runbook("overload"),
                ),
                graph(
                    "Length of prompts",
                    "short",
                    *quantiles("ryzanstein_gateway_prompt_length_tokens", 0.5, 0.99, by="model", where=_MODEL),
                    about="In tokens. Longer prompts make first tokens later.",
                ),
                graph(
                    "Length of answers",
                    "short",
                    *quantiles("ryzanstein_gateway_completion_length_tokens", 0.5, 0.99, by="model", where=_MODEL),
                    about="In tokens.",
                ),
            ),
        ),
        (
            "Refused, taken over, interrupted",
            (
                graph(
                    "Refused by a limit",
                    "reqps",
                    (f"{rate('ryzanstein_gateway_limited_total', 'limit')} or vector(0)", "{{limit}}"),
                    about="Of the tenant's key. " + runbook("overload"),
                ),
                graph(
                    "Routes and fallbacks",
                    "reqps",
                    (f"{rate('ryzanstein_gateway_fallbacks_total', 'model')} or vector(0)", "{{model}}: a fallback"),
                    (rate("ryzanstein_gateway_routed_requests_total", "route, model"), "{{route}}: {{model}}"),
                    (
                        rate("ryzanstein_gateway_mirrored_requests_total", "route, result"),
                        "{{route}} mirrored: {{result}}",
                    ),
                    about="By the model or route asked for, and the model that answers. " + runbook("worker-down"),
                ),
                graph(
                    "Response cache",
                    "ops",
                    (f"{rate('ryzanstein_gateway_response_cache_total', 'result')} or vector(0)", "{{result}}"),
                    about="Lookups; nothing unless it is on.",
                ),
                graph(
                    "Tokens in resumed streams",
                    "short",
                    (rate("ryzanstein_gateway_resumed_tokens_total"), "kept/s"),
                    about="What would have been lost without resuming. " + runbook("worker-down"),
                ),
                graph(
                    "WebSockets",
                    "short",
                    ("sum (ryzanstein_gateway_websocket_connections{@})", "open"),
                    (rate("ryzanstein_gateway_websocket_closes_total", "code"), "closed/s with {{code}}"),
                    about="1005: lost without a close, 1012: the gateway ends.",
                ),
            ),
        ),
        (
            "Batches",
            (
                graph(
                    "Batches",
                    "short",
                    ("max (ryzanstein_gateway_batches_open{@})", "open"),
                    ("sum (ryzanstein_gateway_batches_running{@})", "being worked on"),
                    (f"{rate('ryzanstein_gateway_batches_total', 'status')} or vector(0)", "{{status}}/s"),
                    about="Open ones without an owner wait for a gateway.",
                ),
                graph(
                    "Requests of batches",
                    "reqps",
                    (f"{rate('ryzanstein_gateway_batch_requests_total', 'result')} or vector(0)", "{{result}}"),
                    about="Postponed: limits or missing workers were in the way, they are asked again.",
                ),
            ),
        ),
        (
            "What they depend on, what they take",
            (
                timeline(
                    "Everything there",
                    ("min by (instance) (ryzanstein_gateway_redis_up{@})", "Redis, {{instance}}"),
                    ("min by (instance) (ryzanstein_gateway_router_up{@})", "routers, {{instance}}"),
                    about="Whether each answered last. " + runbook("router-unreachable"),
                ),
                graph(
                    "Time at Redis",
                    "s",
                    *quantiles("ryzanstein_gateway_redis_seconds", 0.5, 0.99),
                    about="Failed operations included. " + runbook("redis-lost"),
                ),
                graph(
                    "Workers and gateways known",
                    "short",
                    ("min (ryzanstein_gateway_known_workers{@})", "workers"),
                    ("max (ryzanstein_gateway_live_peers{@})", "gateways that share limits"),
                    ("sum (ryzanstein_gateway_drain_remaining_streams{@})", "streams left in draining gateways"),
                    about="Workers as the gateway that knows fewest sees them.",
                ),
                graph(
                    "CPU",
                    "short",
                    (f"rate(process_cpu_seconds_total{{@,{_GATEWAY}}}[{INTERVAL}])", "{{instance}}"),
                    about="A gateway uses one core at most. " + runbook("overload"),
                ),
                graph(
                    "Memory",
                    "bytes",
                    (f"process_resident_memory_bytes{{@,{_GATEWAY}}}", "{{instance}}"),
                    ("max (ryzanstein_gateway_batch_storage_bytes{@})", "files of batches, in Redis"),
                    about=runbook("gateway-memory"),
                ),
                graph(
                    "Event loop and files",
                    "percentunit",
                    (f"ryzanstein_process_event_loop_lag_seconds{{@,{_GATEWAY}}}", "lag in s, {{instance}}"),
                    (f"process_open_fds{{@,{_GATEWAY}}} / process_max_fds{{@,{_GATEWAY}}}", "files, {{instance}}"),
                    about="A lag of seconds stops every stream of that gateway. " + runbook("overload"),
                ),
            ),
        ),
    ),
)
