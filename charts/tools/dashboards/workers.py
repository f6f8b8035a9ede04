"""The engines, step by step."""

from __future__ import annotations

from charts.tools.dashboards.grafana import INTERVAL, Dashboard, graph, quantiles, rate, runbook, stat, timeline

_POOL = 'ryzanstein_pool=~"$pool"'
_WORKER = f'component="worker",{_POOL}'

DASHBOARD = Dashboard(
    uid="rz-workers",
    title="Workers",
    filters=(("pool", "ryzanstein_pool", "ryzanstein_worker_running"),),
    rows=(
        (
            "Their state",
            (
                timeline(
                    "Serving",
                    (f'ryzanstein_worker_phase{{@,{_POOL},phase="serving"}}', "{{instance}}"),
                    about="The other phases are loading, sleeping, waking, recovering and draining. "
                    + runbook("worker-down"),
                ),
                stat(
                    "What they serve",
                    "short",
                    (
                        f"count by (model, engine, dtype, device, tensor_parallel, revision) (ryzanstein_worker_info{{@,{_POOL}}})",
                        "{{model}} {{dtype}} {{device}}×{{tensor_parallel}} {{revision}}",
                    ),
                    about="Workers by model, number format, device and ranks.",
                ),
                graph(
                    "Requests",
                    "short",
                    (f"sum by (instance) (ryzanstein_worker_running{{@,{_POOL}}})", "{{instance}} running"),
                    (f"sum by (instance) (ryzanstein_worker_waiting{{@,{_POOL}}})", "{{instance}} waiting"),
                    about=runbook("overload"),
                ),
                graph(
                    "Prompt tokens not yet computed",
                    "short",
                    (f"sum by (instance) (ryzanstein_worker_queued_prefill_tokens{{@,{_POOL}}})", "{{instance}}"),
                    about="Over the speed of prefill, this is the wait for the next first token. "
                    + runbook("overload"),
                ),
                graph(
                    "Waiting and first token, at the worker",
                    "s",
                    *quantiles("ryzanstein_worker_queue_seconds", 0.99, where=_POOL),
                    *(
                        (expr, f"first token {legend}")
                        for expr, legend in quantiles("ryzanstein_worker_ttft_seconds", 0.99, where=_POOL)
                    ),
                    about="The first line is the wait for admission. What the gateway sees beyond these is not the worker's. "
                    + runbook("slow-tokens"),
                ),
            ),
        ),
        (
            "Steps",
            (
                graph(
                    "Tokens",
                    "short",
                    (rate("ryzanstein_worker_prefill_tokens_total", "", _POOL), "prompt tokens computed/s"),
                    (rate("ryzanstein_worker_generated_tokens_total", "", _POOL), "generated/s"),
                    (rate("ryzanstein_worker_discarded_tokens_total", "", _POOL), "drawn after the end/s"),
                    (rate("ryzanstein_worker_drafted_tokens_total", "drafter", _POOL), "drafted by {{drafter}}/s"),
                    (rate("ryzanstein_worker_accepted_tokens_total", "drafter", _POOL), "accepted of {{drafter}}/s"),
                    about="All workers together. Accepted drafts are among the generated tokens; the others cost rows of steps.",
                ),
                graph(
                    "Time of a step",
                    "s",
                    *quantiles("ryzanstein_worker_step_seconds", 0.5, 0.99, by="instance", where=_POOL),
                    about="Every running request gets a token from each, or several with drafts. "
                    + runbook("slow-tokens"),
                ),
                graph(
                    "Tokens in a step",
                    "short",
                    *quantiles("ryzanstein_worker_step_rows", 0.5, 0.99, where=_POOL),
                    about="Many: prompts are computed concurrently with the streams.",
                ),
                graph(
                    "Where a step's time goes",
                    "s",
                    (
                        f"{rate('ryzanstein_worker_step_part_seconds_sum', 'part', _POOL)} / "
                        f"scalar({rate('ryzanstein_worker_step_seconds_count', '', _POOL)})",
                        "{{part}}",
                    ),
                    about="Of rank 0: waiting for work, computing, talking to the other ranks, sampling. "
                    + runbook("slow-tokens"),
                    stacked=True,
                ),
                graph(
                    "Steps",
                    "ops",
                    (rate("ryzanstein_worker_step_seconds_count", "instance", _POOL), "{{instance}}"),
                    about="None while requests run: it is stalled. " + runbook("worker-stalled"),
                ),
                graph(
                    "Since the last step, while requests run",
                    "s",
                    (
                        f"(time() - ryzanstein_worker_last_step_timestamp_seconds{{@,{_POOL}}}) * "
                        f"on (instance) (ryzanstein_worker_running{{@,{_POOL}}} > bool 0)",
                        "{{instance}}",
                    ),
                    about=runbook("worker-stalled"),
                ),
            ),
        ),
        (
            "LoRA adapters",
            (
                graph(
                    "Adapters",
                    "short",
                    (f"sum by (place) (ryzanstein_worker_adapters{{@,{_POOL}}})", "{{place}}"),
                    (f"sum (ryzanstein_worker_adapter_waiting{{@,{_POOL}}})", "requests that wait for one"),
                    about="In slots, and in memory only. " + runbook("adapters"),
                ),
                graph(
                    "Loads",
                    "ops",
                    (
                        rate("ryzanstein_worker_adapter_load_seconds_count", "source, result", _POOL),
                        "from {{source}}: {{result}}",
                    ),
                    (rate("ryzanstein_worker_adapter_evictions_total", "", _POOL), "evictions"),
                    about="An adapter loses its slot when another one needs it. " + runbook("adapters"),
                ),
                graph(
                    "Time of a load",
                    "s",
                    *quantiles("ryzanstein_worker_adapter_load_seconds", 0.5, 0.99, by="source", where=_POOL),
                    about="From the moment that a slot is free. " + runbook("adapters"),
                ),
            ),
        ),
        (
            "Their life",
            (
                graph(
                    "Ranks lost, workers restarted",
                    "short",
                    (
                        f"sum by (cause) (increase(ryzanstein_worker_recoveries_total{{@,{_POOL}}}[1h])) or vector(0)",
                        "{{cause}}, last hour",
                    ),
                    (
                        f"sum by (rank) (increase(ryzanstein_worker_ranks_lost_total{{@,{_POOL}}}[1h])) or vector(0)",
                        "rank {{rank}}",
                    ),
                    (
                        f"sum by (worker) (increase(ryzanstein_worker_restarts_total{{@,{_POOL}}}[1h])) > 0",
                        "{{worker}}",
                    ),
                    about="A restart of the ranks follows each loss. Workers by id: of pods with several models, whose "
                    "restarts Kubernetes does not count. " + runbook("worker-down"),
                ),
                graph(
                    "Requests handed off",
                    "ops",
                    (f"{rate('ryzanstein_worker_handoffs_total', 'reason', _POOL)} or vector(0)", "{{reason}}"),
                    about="Gateways go on with them elsewhere.",
                ),
                graph(
                    "Start, wake and end",
                    "s",
                    (f"max by (phase) (ryzanstein_worker_startup_seconds{{@,{_POOL}}})", "start: {{phase}}"),
                    (quantiles("ryzanstein_worker_wake_seconds", 0.5, where=_POOL)[0][0], "wake, median"),
                    (f"max (ryzanstein_worker_drain_seconds{{@,{_POOL}}})", "draining since"),
                    about="Time of each phase of the slowest rank's last start; the median time of a wake.",
                ),
                graph(
                    "Memory of a worker by purpose",
                    "bytes",
                    (f"max by (kind) (ryzanstein_worker_memory_bytes{{@,{_POOL}}})", "{{kind}}"),
                    about="Of the largest worker, all ranks together, while it serves: each purpose at its largest. "
                    + runbook("kv-full"),
                    stacked=True,
                ),
                graph(
                    "Memory held",
                    "bytes",
                    (f"process_resident_memory_bytes{{@,{_WORKER}}}", "{{instance}}: server"),
                    (f"ryzanstein_worker_memory_held_bytes{{@,{_POOL}}}", "{{instance}}: ranks and host tier"),
                    about="Of the server process. Of the ranks, as measured at the last start, sleep or wake, with the KV "
                    "blocks in the host tier now.",
                ),
                graph(
                    "Restarts",
                    "short",
                    (
                        f"sum by (instance) (changes(process_start_time_seconds{{@,{_WORKER}}}[1h]))",
                        "{{instance}}, last hour",
                    ),
                    (
                        f"rate(process_cpu_seconds_total{{@,{_WORKER}}}[{INTERVAL}])",
                        "{{instance}}, cores of the server",
                    ),
                    about=runbook("worker-down"),
                ),
            ),
        ),
    ),
)
