"""A run as inference-perf reports it: `stage_N_lifecycle_metrics.json`, for tools that compare such reports.

Fields that need the time of each token are null: a chunk of a stream may have several tokens. Times are seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.fleet.load import FleetAnswer
from bench.fleet.report import FleetRun

_PERCENTILES = (0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
Summary = dict[str, float] | None


def write_lifecycles(folder: Path, runs: Sequence[FleetRun]) -> None:
    """Write a file for each run."""
    folder.mkdir(parents=True, exist_ok=True)
    for stage, run in enumerate(runs):
        (folder / f"stage_{stage}_lifecycle_metrics.json").write_text(json.dumps(lifecycle(run), indent=2) + "\n")


def lifecycle(run: FleetRun) -> dict[str, object]:
    """The metrics of a run."""
    whole = [each for each in run.answers if not each.lost()]
    failed = [each for each in run.answers if each.lost()]
    starts = [each.at for each in run.answers]
    total_s = max((each.at + each.seconds for each in run.answers), default=0.0) - min(starts, default=0.0)
    sending_s = max(starts, default=0.0) - min(starts, default=0.0)
    return {
        "benchmark_time_seconds": total_s,
        "load_summary": {
            "count": len(run.answers),
            "schedule_delay": summary([each.late_s for each in run.answers]),
            "send_duration": sending_s,
            "requested_rate": run.load.rate,
            "achieved_rate": len(run.answers) / sending_s if sending_s else 0.0,
        },
        "successes": {
            "count": len(whole),
            "latency": _latency(whole),
            "throughput": _throughput(whole, total_s),
            "prompt_tokens": _prompt_tokens(whole),
            "output_tokens": _counts([each.request.max_tokens for each in whole]),
        },
        "failures": {
            "count": len(failed),
            "request_latency": summary([each.seconds for each in failed]),
            "prompt_tokens": _prompt_tokens(failed),
            "by_label": {
                label: {"count": n, "messages": [{"message": label}]}
                for label, n in Counter(each.error or "no end" for each in failed).most_common()
            },
        },
    }


def summary(values: Sequence[float]) -> Summary:
    """The distribution of values; None without any."""
    if not values:
        return None
    cuts = np.percentile(values, _PERCENTILES)
    names = ("median" if percent == 50 else f"p{percent:g}" for percent in _PERCENTILES)
    shape = {"mean": float(np.mean(values)), "min": float(min(values)), "max": float(max(values))}
    return shape | {name: float(cut) for name, cut in zip(names, cuts, strict=True)}


def _latency(whole: Sequence[FleetAnswer]) -> dict[str, Summary]:
    return {
        "request_latency": summary([each.seconds for each in whole]),
        "normalized_time_per_output_token": summary([each.seconds / each.request.max_tokens for each in whole]),
        "time_per_output_token": summary([each.pace_s for each in whole if each.request.max_tokens > 1]),
        "time_to_first_token": summary([each.first_token_s for each in whole]),
        "inter_token_latency": None,
    }


def _throughput(whole: Sequence[FleetAnswer], seconds: float) -> dict[str, float]:
    n_input = sum(len(each.request.prompt_ids) for each in whole)
    n_output = sum(each.request.max_tokens for each in whole)
    totals = {
        "input_tokens_per_sec": n_input,
        "output_tokens_per_sec": n_output,
        "total_tokens_per_sec": n_input + n_output,
        "requests_per_sec": len(whole),
    }
    return {name: total / seconds if seconds else 0.0 for name, total in totals.items()}


def _prompt_tokens(answers: Sequence[FleetAnswer]) -> dict[str, float]:
    n_cached = float(sum(each.cached_tokens for each in answers))
    counts = _counts([len(each.request.prompt_ids) for each in answers])
    return counts | {"cached": n_cached, "uncached": counts["total"] - n_cached}


def _counts(tokens: Sequence[int]) -> dict[str, float]:
    return {"total": float(sum(tokens))} | (summary(tokens) or {})
