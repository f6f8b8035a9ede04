"""The panel that divides the machines' power among tenants, as promtool computes it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml

from tests.programs import program
from tests.unit.monitoring.panels import panels

OF = 'namespace="n",release="r"'
TOKENS = f"ryzanstein_gateway_tokens_total{{{OF},"
JOULES = f"ryzanstein_worker_energy_joules_total{{{OF},"
SERIES = {  # each minute
    JOULES + 'instance="a",device="gpu-0"}': "0+4500x20",
    JOULES + 'instance="b",device="package-0"}': "0+1500x20",
    TOKENS + 'kind="completion",model="m",tenant="acme"}': "0+180x20",
    TOKENS + 'kind="completion",model="m",tenant="bolt"}': "0+60x20",
    TOKENS + 'kind="prompt",model="m",tenant="bolt"}': "0+9000x20",
}


def test_tenants_have_the_power_of_all_machines_by_their_generated_tokens(tmp_path: Path) -> None:
    (panel,) = [panel for name, panel in panels() if name == "rz-usage: Power by tenant"]
    query = panel["targets"][0]["expr"]
    for variable, value in (("$namespace", ".*"), ("$release", ".*"), ("$__rate_interval", "5m")):
        query = query.replace(variable, value)
    watts = [{"labels": f'{{tenant="{name}"}}', "value": value} for name, value in (("acme", 75), ("bolt", 25))]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in SERIES.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "10m", "exp_samples": watts}],
    }
    file = tmp_path / "power.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
