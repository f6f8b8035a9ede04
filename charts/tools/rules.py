"""Recording rules: the indicators of both objectives over every window that an alert asks for."""

from __future__ import annotations

from typing import Any

import yaml

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
_BY = "job, namespace, release"
_JOB = 'job="ryzanstein"'
_HEAD = """\
# Made by charts/tools/rules.py. The chart replaces job="ryzanstein" by its release's labels and le="2.5" by
# monitoring.rules.slo.ttftSeconds.
"""


def recording() -> str:
    """The file, as Prometheus reads it."""
    groups = [
        {"name": "ryzanstein-errors", "rules": [_errors(window) for window in WINDOWS]},
        {"name": "ryzanstein-first-tokens", "rules": [_first_tokens(window) for window in WINDOWS]},
        {"name": "ryzanstein-levels", "rules": _levels()},
    ]
    return _HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, width=10_000)


def _rule(record: str, expr: str) -> dict[str, Any]:
    return {"record": f"ryzanstein:{record}", "expr": expr}


def _errors(window: str) -> dict[str, Any]:
    """Failed requests over all but those that the client caused; without any it is NaN, which raises no alert.

    Requests of batches are asked again, for hours: their failures are no client's.
    """

    def requests(status: str) -> str:
        labels = f'{_JOB},api!="batch",model!="",status{status}'
        return f"sum by ({_BY}, model) (rate(ryzanstein_gateway_requests_total{{{labels}}}[{window}]))"

    # The sum of none is no series, and that of a model without errors must be 0.
    failed, counted = requests('=~"5.."'), requests('!~"4.."')
    failed = f"({failed} or 0 * {counted})"
    return _rule(f"sli_errors:ratio_rate{window}", f"{failed} / {counted}")


def _first_tokens(window: str) -> dict[str, Any]:
    """First tokens that were late over all."""

    def tokens(suffix: str, labels: str) -> str:
        metric = f"ryzanstein_gateway_time_to_first_token_seconds_{suffix}"
        return f"sum by ({_BY}, model) (rate({metric}{{{labels}}}[{window}]))"

    in_time, every = tokens("bucket", f'{_JOB},le="2.5"'), tokens("count", _JOB)
    return _rule(f"sli_ttft:ratio_rate{window}", f"1 - {in_time} / {every}")


def _levels() -> list[dict[str, Any]]:
    def total(metric: str, by: str) -> str:
        return f"sum by ({_BY}, {by}) ({metric}{{{_JOB}}})"

    def rate(metric: str) -> str:
        return f"sum by ({_BY}, model) (rate({metric}{{{_JOB}}}[10m]))"

    workers = "ryzanstein_pool, instance"
    return [
        _rule(
            "requests:increase1h",
            f'sum by ({_BY}, model) (increase(ryzanstein_gateway_requests_total{{{_JOB},model!=""}}[1h]))',
        ),
        _rule(
            "kv_usage:ratio",
            f"{total('ryzanstein_worker_kv_blocks_used', workers)} / "
            f"{total('ryzanstein_worker_kv_blocks_capacity', workers)}",
        ),
        _rule(
            "affinity:ratio_rate10m",
            f"{rate('ryzanstein_router_matched_tokens_total')} / {rate('ryzanstein_router_prompt_tokens_total')}",
        ),
    ]
