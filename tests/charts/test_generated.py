"""Files that are generated from values.yaml are up to date and complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

from charts.tools import build, schema, values

VALUES = """
# Open to others. @schema {additionalProperties: true}
global:
  mirror: ""
gateway:
  # How many. @schema {minimum: 1}
  replicas: 1
  resources: {limits: {memory: 1Gi}}
podDefaults: {}
workers:
  defaults:
    model: ""
"""


def test_made_files_are_current() -> None:
    """Otherwise: make reference."""
    assert [path.name for path, text in build.made().items() if path.read_text() != text] == []


def test_our_maps_are_strict_and_kubernetes_maps_are_open(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(VALUES)
    made = schema.build(values.read(path))
    assert made["additionalProperties"] is False
    properties = made["properties"]
    assert properties["global"]["additionalProperties"] is True
    assert properties["gateway"]["additionalProperties"] is False
    assert properties["gateway"]["properties"]["resources"] == {"type": "object"}
    assert properties["gateway"]["properties"]["replicas"] == {
        "description": "How many.",
        "type": "integer",
        "minimum": 1,
    }


def test_every_setting_of_a_service_is_a_value_of_its_own_or_among_its_settings() -> None:
    """Names survive the way from max_body_bytes to maxBodyBytes; the rendering tests hold the way back."""
    made = json.loads((build.CHART / "values.schema.json").read_text())["properties"]
    for service in ("gateway", "router", "finetuner"):
        names = made[service]["properties"]["settings"]["properties"]
        fields = set(schema.SETTINGS[service].model_fields)
        assert {name.replace("_", "") for name in fields} >= {name.lower() for name in names}
        assert names


def test_values_of_a_pool_allow_the_choices_of_its_setting() -> None:
    """A KV format that workers know is known to the chart."""
    pool, fields = values.read(build.CHART / "values.yaml").child("workers", "defaults"), schema.SETTINGS["worker"]
    for value, setting in (("kvDtype", "kv_dtype"), ("dtype", "dtype"), ("device", "device")):
        choices = get_args(fields.model_fields[setting].annotation)
        assert tuple(pool.child(value).schema["enum"]) == choices, value


def test_every_value_has_a_comment_or_a_plain_name() -> None:
    """A key whose name doesn't say it all has a comment."""
    plain = {"registry", "repository", "port", "annotations", "name", "key", "tag", "digest", "hostnames", "enabled"}
    root = values.read(build.CHART / "values.yaml")
    silent = [child.key for child in root.child("workers", "defaults").children if not child.description]
    assert set(silent) <= plain | {"replicas", "gpu", "runtimeClassName", "dtype"}
