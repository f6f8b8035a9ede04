"""Where KV blocks are, who finds them, and how they move."""

from __future__ import annotations

from charts.tools.dashboards.grafana import Dashboard, graph, quantiles, rate, runbook

_POOL = 'ryzanstein_pool=~"$pool"'
_HITS = rate("ryzanstein_worker_prefix_hit_tokens_total", "", _POOL)

DASHBOARD = Dashboard(
    uid="rz-kv",
    title="KV cache",
    filters=(("pool", "ryzanstein_pool", "ryzanstein_worker_running"),),
    rows=(
        (
            "In workers",
            (
                graph(
                    "Blocks",
                    "short",
                    (f"sum (ryzanstein_worker_kv_blocks_used{{@,{_POOL}}})", "used"),
                    (f"sum (ryzanstein_worker_kv_blocks_cached{{@,{_POOL}}})", "cached, evictable"),
                    (f"sum (ryzanstein_worker_kv_blocks_capacity{{@,{_POOL}}})", "there are"),
                    (f"sum (ryzanstein_worker_copy_lag_blocks{{@,{_POOL}}})", "not yet at standbys"),
                    about="Cached ones make room for used ones. Blocks that standbys lack are computed again when their "
                    "worker is lost. " + runbook("kv-full"),
                ),
                graph(
                    "Used share",
                    "percentunit",
                    (f"ryzanstein:kv_usage:ratio{{@,{_POOL}}}", "{{instance}}"),
                    about="Held by requests. " + runbook("kv-full"),
                ),
                graph(
                    "Preemptions",
                    "ops",
                    (rate("ryzanstein_worker_preemptions_total", "instance", _POOL), "{{instance}}"),
                    about="Requests put back because the cache was full: they are computed again. "
                    + runbook("kv-full"),
                ),
                graph(
                    "Prefix hits",
                    "percentunit",
                    (
                        f"{_HITS} / ({_HITS} + {rate('ryzanstein_worker_prefill_tokens_total', '', _POOL)})",
                        "of known tokens",
                    ),
                    about="What did not have to be computed. " + runbook("affinity"),
                ),
                graph(
                    "Promised and found",
                    "short",
                    (rate("ryzanstein_router_matched_tokens_total"), "promised tokens/s"),
                    (rate("ryzanstein_worker_prefix_hit_tokens_total"), "found tokens/s"),
                    (rate("ryzanstein_worker_resumed_tokens_total", "", _POOL), "resumed prompt tokens/s"),
                    (rate("ryzanstein_worker_resumed_cached_tokens_total", "", _POOL), "found resumed prompt tokens/s"),
                    about="Far more promised than found: the coordinator knows blocks that are gone. "
                    + runbook("coordinator"),
                ),
            ),
        ),
        (
            "Coordinator",
            (
                graph(
                    "Lookups",
                    "ops",
                    (rate("ryzanstein_coordinator_lookups_total", "result"), "{{result}}"),
                    about="Hit: some worker has something.",
                ),
                graph(
                    "Time of a lookup",
                    "s",
                    *quantiles("ryzanstein_coordinator_lookup_seconds", 0.5, 0.99),
                    about="Routers wait 25 ms. " + runbook("coordinator"),
                ),
                graph(
                    "Blocks known",
                    "short",
                    ("sum (ryzanstein_coordinator_blocks{@})", "distinct"),
                    ("sum (ryzanstein_coordinator_entries{@})", "with their copies"),
                    about="Copies over distinct: how often the same prefix is kept.",
                ),
                graph(
                    "Workers",
                    "short",
                    ("sum by (state) (ryzanstein_coordinator_workers{@})", "{{state}}"),
                    about="Behind: their prefixes are not found. " + runbook("coordinator"),
                ),
                graph(
                    "Lag",
                    "s",
                    ("max (ryzanstein_coordinator_lag_seconds{@})", "longest out of step"),
                    about="A dump takes seconds. " + runbook("coordinator"),
                ),
                graph(
                    "Events",
                    "ops",
                    (rate("ryzanstein_coordinator_events_total", "kind"), "{{kind}}"),
                    about="Gaps and resyncs belong to starts and broken streams. " + runbook("coordinator"),
                ),
            ),
        ),
        (
            "Host memory and disk",
            (
                graph(
                    "Blocks below the device",
                    "ops",
                    (rate("ryzanstein_worker_kv_place_hits_total", "place", _POOL), "{{place}}: hits"),
                    (rate("ryzanstein_worker_kv_place_misses_total", "place", _POOL), "{{place}}: misses"),
                    (rate("ryzanstein_worker_kv_place_loaded_blocks_total", "place", _POOL), "{{place}}: loaded"),
                    (rate("ryzanstein_worker_kv_place_evicted_blocks_total", "place", _POOL), "{{place}}: evicted"),
                    about="Hits and misses: blocks of prompts that the KV cache did not hold. Far more evicted than "
                    "loaded: the place is too small for its prompts.",
                ),
                graph(
                    "Bytes kept",
                    "bytes",
                    (f"sum by (place) (ryzanstein_worker_kv_place_bytes{{@,{_POOL}}})", "{{place}}"),
                    (f"sum by (place) (ryzanstein_worker_kv_place_capacity_bytes{{@,{_POOL}}})", "{{place}}: capacity"),
                    about="All workers together.",
                ),
                graph(
                    "Bytes to and from them",
                    "Bps",
                    (rate("ryzanstein_worker_kv_place_stored_bytes_total", "place", _POOL), "to {{place}}"),
                    (rate("ryzanstein_worker_kv_place_loaded_bytes_total", "place", _POOL), "from {{place}}"),
                    about="Writes follow the steps; loads replace the computing of prompts.",
                ),
                graph(
                    "Speed of a load",
                    "Bps",
                    (
                        f"{rate('ryzanstein_worker_kv_place_loaded_bytes_total', 'place', _POOL)} / "
                        f"{rate('ryzanstein_worker_kv_place_loaded_seconds_total', 'place', _POOL)}",
                        "{{place}}",
                    ),
                    about="Until the blocks are in the KV cache. A load that takes longer than computing is not begun.",
                ),
                graph(
                    "Blocks not kept or not loaded",
                    "ops",
                    (
                        rate("ryzanstein_worker_kv_place_failures_total", "place, reason", _POOL),
                        "{{place}}: {{reason}}",
                    ),
                    (f"sum by (place) (ryzanstein_worker_kv_place_failing{{@,{_POOL}}})", "{{place}}: failing workers"),
                    about="Corrupt: damaged or foreign files, computed again. Io: the disk is full or fails. Late: evicted "
                    "before they were copied. Slow: computing takes less time. " + runbook("kv-tiers"),
                ),
            ),
        ),
        (
            "Between workers",
            (
                graph(
                    "Blocks moved",
                    "ops",
                    (rate("ryzanstein_worker_pulled_blocks_total", "instance", _POOL), "to {{instance}}"),
                    (rate("ryzanstein_worker_sent_blocks_total", "instance", _POOL), "from {{instance}}"),
                    (rate("ryzanstein_worker_copied_blocks_total", "instance", _POOL), "copied to {{instance}}"),
                    about="Prefixes that were fetched because that beats computing them, and copies at standbys.",
                ),
                graph(
                    "Bytes moved",
                    "Bps",
                    (rate("ryzanstein_worker_pulled_bytes_total", "", _POOL), "pulled"),
                    (rate("ryzanstein_worker_sent_bytes_total", "", _POOL), "sent"),
                    (rate("ryzanstein_worker_copied_bytes_total", "", _POOL), "copied to standbys"),
                    about="All workers together.",
                ),
                graph(
                    "Speed of a pull",
                    "Bps",
                    (
                        f"{rate('ryzanstein_worker_pulled_bytes_total', 'instance', _POOL)} / "
                        f"{rate('ryzanstein_worker_pulled_seconds_total', 'instance', _POOL)}",
                        "{{instance}}",
                    ),
                    about="Failed pulls included.",
                ),
                graph(
                    "Pulls and copies that failed",
                    "ops",
                    (rate("ryzanstein_worker_pull_failures_total", "reason", _POOL), "{{reason}}"),
                    (rate("ryzanstein_worker_copy_failures_total", "reason", _POOL), "copy to a standby: {{reason}}"),
                    about="The tokens are computed instead. Full: a standby has no room. " + runbook("kv-pulls"),
                ),
            ),
        ),
    ),
)
