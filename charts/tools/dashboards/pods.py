"""Every process, by its own metrics: needs nothing of Kubernetes."""

from __future__ import annotations

from charts.tools.dashboards.grafana import INTERVAL, Dashboard, graph, runbook, stat, timeline

DASHBOARD = Dashboard(
    uid="rz-pods",
    title="Processes",
    filters=(("component", "component", "ryzanstein_build_info"),),
    rows=(
        (
            "Processes",
            (
                timeline(
                    "Scraped",
                    ('up{@,component=~"$component"}', "{{component}} {{instance}}"),
                    about="Whether Prometheus reaches it. " + runbook("targets"),
                ),
                stat(
                    "Versions",
                    "short",
                    (
                        'count by (service, version, commit, python) (ryzanstein_build_info{@,component=~"$component"})',
                        "{{service}} {{version}} {{commit}} Python {{python}}",
                    ),
                    about=runbook("upgrade-stuck"),
                ),
                graph(
                    "Restarts, last hour",
                    "short",
                    (
                        'sum by (component, instance) (changes(process_start_time_seconds{@,component=~"$component"}[1h]))',
                        "{{component}} {{instance}}",
                    ),
                    about=runbook("pods"),
                ),
                graph(
                    "Late requests",
                    "s",
                    (
                        'max by (instance) (ryzanstein_gateway_drain_last_request_seconds{@,component=~"$component"})',
                        "{{instance}}",
                    ),
                    about="How long after a gateway was not ready any more its last new request came. Above "
                    "gateway.drain.delaySeconds, balancers notice late. " + runbook("ingress-timeouts"),
                ),
            ),
        ),
        (
            "What they take",
            (
                graph(
                    "CPU",
                    "short",
                    (
                        f'rate(process_cpu_seconds_total{{@,component=~"$component"}}[{INTERVAL}])',
                        "{{component}} {{instance}}",
                    ),
                    about="Cores. Of workers the server alone.",
                ),
                graph(
                    "Memory",
                    "bytes",
                    ('process_resident_memory_bytes{@,component=~"$component"}', "{{component}} {{instance}}"),
                    about=runbook("gateway-memory"),
                ),
                graph(
                    "Virtual memory",
                    "bytes",
                    ('process_virtual_memory_bytes{@,component=~"$component"}', "{{component}} {{instance}}"),
                    about="Addresses, not memory.",
                ),
                graph(
                    "Open files",
                    "percentunit",
                    (
                        'process_open_fds{@,component=~"$component"} / process_max_fds{@,component=~"$component"}',
                        "{{component}} {{instance}}",
                    ),
                    about="Of as many as it may have. " + runbook("overload"),
                ),
                graph(
                    "Event loop lag",
                    "s",
                    (
                        'ryzanstein_process_event_loop_lag_seconds{@,component=~"$component"}',
                        "{{component}} {{instance}}",
                    ),
                    about="Longest since the last scrape; `/livez` fails at 5 s. " + runbook("overload"),
                ),
                graph(
                    "Certificate ends in",
                    "s",
                    (
                        'ryzanstein_tls_certificate_end_seconds{@,component=~"$component"} - time() '
                        'and ryzanstein_tls_certificate_end_seconds{@,component=~"$component"} > 0',
                        "{{component}} {{instance}}",
                    ),
                    about="Nothing without TLS. " + runbook("certificates"),
                ),
                graph(
                    "Objects spared by garbage collections",
                    "short",
                    ('ryzanstein_process_frozen_objects{@,component=~"$component"}', "{{component}} {{instance}}"),
                    about="Without them a full collection is a pause of up to 0.1 s.",
                ),
            ),
        ),
    ),
)
