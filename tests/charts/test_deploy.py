"""Terraform, Argo CD and Flux give the chart values that it takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hcl2
import yaml

from tests.charts.rendering import render
from tests.programs import CHART

DEPLOY = CHART.parents[1] / "deploy"
TERRAFORM = DEPLOY / "terraform"
EXAMPLES = sorted((TERRAFORM / "examples").iterdir())


def _read(folder: Path) -> dict[str, list[Any]]:
    """All blocks of a folder's files by kind."""
    actual: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("*.tf")):
        for kind, blocks in _plain(hcl2.loads(file.read_text())).items():
            actual.setdefault(kind, []).extend(blocks if isinstance(blocks, list) else [])
    return actual


def _plain(value: Any) -> Any:
    """Without the quotes and marks of the parser; references as the text x."""
    if isinstance(value, dict):
        return {
            re.sub(r"\$\{.*\}", "x", key.strip('"')): _plain(each) for key, each in value.items() if "__" not in key
        }
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return re.sub(r"\$\{[^}]*\}/?", "", value.strip('"')) if isinstance(value, str) else value


def _names(blocks: list[Any]) -> set[str]:
    return {name for block in blocks for name in block}


def _expect_rendered(profiles: list[str], values: Any) -> None:
    """The chart takes the values, over each of the profiles."""
    for profile in profiles:
        assert render(CHART / profile, yaml.safe_dump(values)).pods_of("gateway")


def test_the_module_uses_every_declared_variable() -> None:
    module = TERRAFORM / "module"
    text = "".join(file.read_text() for file in module.glob("*.tf"))
    declared = _names(_read(module)["variable"])
    assert set(re.findall(r"\bvar\.(\w+)", text)) == declared
    assert all(block[name]["description"] for block in _read(module)["variable"] for name in block)


def test_the_examples_set_only_known_variables_and_values() -> None:
    declared = _names(_read(TERRAFORM / "module")["variable"])
    assert len(EXAMPLES) == 2
    for example in EXAMPLES:
        ((call,),) = [list(block.values()) for block in _read(example)["module"]]
        assert (example / call["source"]).resolve() == TERRAFORM / "module"
        assert set(call) - {"source", "depends_on"} <= declared
        files = [(example / path).resolve() for path in (call["chart"], *call["values_files"])]
        assert files[0] == CHART
        values = yaml.safe_load(yaml.safe_dump(call["values"]).replace("var.workers", "2"))
        for pool in values.get("workers", {}).get("pools", {}).values():
            pool["replicas"] = 2  # a reference
        _expect_rendered([str(path.relative_to(CHART)) for path in files[1:]], values)


def test_argo_cd_sets_only_known_values() -> None:
    source = yaml.safe_load((DEPLOY / "argocd" / "application.yaml").read_text())["spec"]["source"]
    assert CHART.parents[1] / source["path"] == CHART
    _expect_rendered(source["helm"]["valueFiles"], source["helm"]["valuesObject"])


def test_flux_sets_only_known_values() -> None:
    *_, release = yaml.safe_load_all((DEPLOY / "flux" / "release.yaml").read_text())
    spec = release["spec"]["chart"]["spec"]
    files = [CHART.parents[1] / path for path in spec["valuesFiles"]]
    assert CHART.parents[1] / spec["chart"] == CHART
    assert all(file.exists() for file in files)
    _expect_rendered([str(file.relative_to(CHART)) for file in files], release["spec"]["values"])
