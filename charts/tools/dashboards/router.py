"""How requests are placed, and whether sessions stay where their cache is."""

from __future__ import annotations

from charts.tools.dashboards.grafana import INTERVAL, Dashboard, graph, quantiles, rate, runbook

_MODEL = 'model=~"$model"'

DASHBOARD = Dashboard(
    uid="rz-router",
    title="Routers and sessions",
    filters=(("model", "model", "ryzanstein_router_workers"),),
    rows=(
        (
            "Decisions",
            (
                graph(
                    "Placed, by reason",
                    "reqps",
                    (rate("ryzanstein_router_decisions_total", "reason", _MODEL), "{{reason}}"),
                    about="`Explain` of a router lists a single decision's terms.",
                    stacked=True,
                ),
                graph(
                    "Not placed, by code",
                    "reqps",
                    (f"{rate('ryzanstein_router_refusals_total', 'code')} or vector(0)", "{{code}}"),
                    about="resource_exhausted: every worker is full, clients see 429. " + runbook("overload"),
                ),
                graph(
                    "Time of a decision",
                    "s",
                    *quantiles("ryzanstein_router_decision_seconds", 0.5, 0.99),
                    about="Without the queue. Tens of milliseconds: the router is overloaded. " + runbook("overload"),
                ),
                graph(
                    "Queue",
                    "short",
                    (f"sum by (model) (ryzanstein_router_queue_length{{@,{_MODEL}}})", "{{model}}"),
                    about="Requests that no worker takes now. " + runbook("overload"),
                ),
                graph(
                    "Held for a model that starts",
                    "short",
                    (f"sum by (model) (ryzanstein_router_held_requests{{@,{_MODEL}}})", "{{model}}"),
                    (f"max by (model) (ryzanstein_router_held_seconds{{@,{_MODEL}}})", "{{model}}, longest wait in s"),
                    about="Requests that wait while no worker serves the model. " + runbook("worker-down"),
                ),
                graph(
                    "Wait in the queue",
                    "s",
                    *quantiles("ryzanstein_router_queue_seconds", 0.5, 0.99),
                    about="Of requests that had to wait and were placed. " + runbook("overload"),
                ),
                graph(
                    "First token, expected and measured",
                    "s",
                    *(
                        (query, f"{legend} {whose}")
                        for whose, metric in (
                            ("expected", "ryzanstein_router_expected_first_token_seconds"),
                            ("measured", "ryzanstein_gateway_time_to_first_token_seconds"),
                        )
                        for query, legend in quantiles(metric, 0.5, by="model", where=_MODEL)
                    ),
                    about="Far apart: workers are slower than they say, or requests wait elsewhere. "
                    + runbook("slow-tokens"),
                ),
                graph(
                    "Decisions by router",
                    "reqps",
                    (rate("ryzanstein_router_decisions_total", "instance", _MODEL), "{{instance}}"),
                    about="A gateway uses one router at a time: with few gateways uneven shares are ordinary.",
                ),
            ),
        ),
        (
            "Scaling of pools",
            (
                graph(
                    "Replicas",
                    "short",
                    ("max by (pool, kind) (ryzanstein_router_pool_replicas{@})", "{{pool}} {{kind}}"),
                    about="Of pools with autoscaling.mode builtin. " + runbook("autoscaling"),
                ),
                graph(
                    "Demand",
                    "short",
                    ("max by (pool) (ryzanstein_router_pool_load{@})", "{{pool}}"),
                    about="In workers: what the targets for first token, pace and KV cache need.",
                ),
                graph(
                    "Changes, by reason",
                    "short",
                    (
                        "sum by (pool, reason) (increase(ryzanstein_router_scalings_total{@}[5m]))",
                        "{{pool}} {{reason}}",
                    ),
                    about="In five minutes; the router's log has each with its numbers.",
                ),
            ),
        ),
        (
            "Sessions and prefixes",
            (
                graph(
                    "What became of sessions",
                    "reqps",
                    (rate("ryzanstein_router_session_bindings_total", "result"), "{{result}}"),
                    about="Moved: to another worker, whose cache has nothing of it. " + runbook("affinity"),
                    stacked=True,
                ),
                graph(
                    "Prompt tokens found cached",
                    "percentunit",
                    (f"ryzanstein:affinity:ratio_rate10m{{@,{_MODEL}}}", "{{model}}, promised"),
                    (
                        f"{rate('ryzanstein_router_matched_tokens_total', 'model', _MODEL)} / "
                        f"{rate('ryzanstein_router_prompt_tokens_total', 'model', _MODEL)}",
                        "{{model}}, now",
                    ),
                    about="By the coordinator's word. " + runbook("affinity"),
                ),
                graph(
                    "Lookups at the coordinator",
                    "ops",
                    (rate("ryzanstein_router_lookups_total", "result"), "{{result}}"),
                    about="Failed ones cost prefix credit, never a request. " + runbook("coordinator"),
                ),
                graph(
                    "Load of workers",
                    "percentunit",
                    (
                        f"{rate('ryzanstein_worker_generated_tokens_total', 'instance')} / "
                        f"scalar({rate('ryzanstein_worker_generated_tokens_total')})",
                        "{{instance}}",
                    ),
                    about="Share of all tokens generated. " + runbook("affinity"),
                ),
            ),
        ),
        (
            "Workers as routers see them",
            (
                graph(
                    "Workers by state",
                    "short",
                    (f"max by (model, state) (ryzanstein_router_workers{{@,{_MODEL}}}) > 0", "{{model}} {{state}}"),
                    about="Only eligible ones take work. " + runbook("worker-down"),
                    stacked=True,
                ),
                graph(
                    "Breakers not closed",
                    "short",
                    (
                        f'max by (model, state) (ryzanstein_router_breakers{{@,{_MODEL},state!="closed"}})',
                        "{{model}} {{state}}",
                    ),
                    about="Open: three faults in a row, nothing is sent for up to a minute. " + runbook("worker-down"),
                ),
                graph(
                    "Outcomes that gateways report",
                    "ops",
                    (rate("ryzanstein_router_outcomes_total", "result"), "{{result}}"),
                    about="Faults count against a worker, hand-offs and cancellations do not.",
                ),
                graph(
                    "Time at Redis",
                    "s",
                    *quantiles("ryzanstein_router_redis_seconds", 0.5, 0.99),
                    about="Of sessions; it has 250 ms. " + runbook("redis-lost"),
                ),
                graph(
                    "CPU",
                    "short",
                    (f'rate(process_cpu_seconds_total{{@,component="router"}}[{INTERVAL}])', "{{instance}}"),
                    about="A router uses one core at most. " + runbook("overload"),
                ),
            ),
        ),
    ),
)
