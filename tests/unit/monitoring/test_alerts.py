"""Every alert fires when it should, not a minute before, and not for what only looks alike; each has a runbook."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import CHART, program
from tests.unit.monitoring.exported import alerts, rules

# As text: 0x20, for Prometheus 21 zeros, is a number to YAML.
CASES: dict[str, Any] = yaml.load((Path(__file__).parent / "alert_cases.yaml").read_text(), yaml.BaseLoader)
RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"


def test_every_alert_has_its_cases() -> None:
    assert CASES.keys() == alerts().keys()
    for name, case in CASES.items():
        assert case["silent"], name


def test_alerts_fire_exactly_when_expected(tmp_path: Path) -> None:
    done = _promtool(CASES, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_case_can_fail(tmp_path: Path) -> None:
    """The look-alikes of one alert, told to fire, are found; so is one that fires early."""
    case = CASES["RyzansteinRedisAway"]
    early = {"RyzansteinRedisAway": {"fires": {**case["fires"], "at": "3"}, "silent": {}}}
    wrong = {"RyzansteinRedisAway": {"fires": {"at": "2", "series": case["silent"]["a restart"]}, "silent": {}}}
    for cases in (early, wrong):
        assert _promtool(cases, tmp_path).returncode != 0


def _promtool(cases: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """A file for each alert, with it alone and what it reads: all rules in every test take minutes."""
    files = []
    for alert, case in cases.items():
        (folder / f"{alert}.rules.yaml").write_text(
            yaml.safe_dump({"groups": [{"name": "g", "rules": _needed(alert)}]})
        )
        tests = {
            "rule_files": [f"{alert}.rules.yaml"],
            "evaluation_interval": "1m",
            "tests": list(_of_case(alert, case)),
        }
        files.append(folder / f"{alert}.yaml")
        files[-1].write_text(yaml.safe_dump(tests))
    command = [program("promtool"), "test", "rules", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _needed(alert: str) -> list[dict[str, Any]]:
    """The alert, after the recorded series in its expression."""
    rule = alerts()[alert]
    return [each for each in rules() if "record" in each and each["record"] + "{" in rule["expr"]] + [rule]


def _of_case(alert: str, case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = int(case["fires"]["at"])
    before = [(at - 1, False)] if at else []
    yield _test(f"{alert} fires", alert, case["fires"]["series"], [*before, (at, True)])
    for name, series in case["silent"].items():
        # Longer than it waits, and than the series last.
        yield _test(f"{alert}: {name}", alert, series, [(minute, False) for minute in _minutes(series)])


def _minutes(series: dict[str, str]) -> list[int]:
    length = min(_length(values) for values in series.values())
    return sorted({*range(0, length, max(1, length // 30)), length - 1})


def _length(values: str) -> int:
    return sum(
        int(part.rpartition("x")[2]) + (not part.startswith("_")) if "x" in part else 1 for part in values.split()
    )


def _test(name: str, alert: str, series: dict[str, str], expected: list[tuple[int, bool]]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [
            {"series": key.replace("{@", '{job="ryzanstein"'), "values": str(values)} for key, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
            for minute, fires in expected
        ],
    }


@pytest.mark.parametrize("name", alerts())
def test_every_alert_has_a_runbook(name: str) -> None:
    url = alerts()[name]["annotations"]["runbook_url"]
    text = (RUNBOOKS / url.rsplit("/", 1)[1]).read_text()
    assert name in text, "a runbook names its alerts"
    assert "kubectl" in text, "and what to type"


def test_every_runbook_link_leads_to_a_runbook() -> None:
    files = [*(CHART / "files").rglob("*.json"), *(CHART / "files").rglob("*.yaml")]
    named = {name for file in files for name in re.findall(r"docs/runbooks/([\w-]+)\.md", file.read_text())}
    assert len(named) > 10
    assert [name for name in named if not (RUNBOOKS / f"{name}.md").exists()] == []
