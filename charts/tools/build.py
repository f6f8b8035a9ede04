"""The chart's generated files: from values.yaml a schema, a table in its README and a list of images; dashboards;
recording rules.

``python -m charts.tools.build`` writes them; a test compares them with what is committed.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from charts.tools import dashboards, readme, rules, schema, values

CHART = Path(__file__).resolve().parents[1] / "ryzanstein"
TARGETS = (
    *("cli", "gateway", "kv-coordinator", "router"),
    *("finetuner-cpu", "finetuner-cuda", "worker-cpu", "worker-cuda", "worker-vllm"),
)
_OF_OTHERS = (
    ("redis",),
    *(("monitoring", name) for name in ("prometheus", "grafana", "collector", "loki")),
    ("monitoring", "loki", "alloy"),
    ("tracing", "jaeger"),
)


def made(chart: Path = CHART) -> dict[Path, str]:
    """Every made file and its text."""
    root = values.read(chart / "values.yaml")
    return {
        chart / "values.schema.json": json.dumps(schema.build(root), indent=1, ensure_ascii=False) + "\n",
        chart / "README.md": readme.write((chart / "README.md").read_text(), root),
        chart / "images.txt": "".join(f"{image}\n" for image in sorted(set(_images(root, chart)))),
        chart / "files" / "rules" / "recording.yaml": rules.recording(),
        **{chart / "files" / "dashboards" / f"{uid}.json": text for uid, text in dashboards.made().items()},
    }


def _images(root: values.Value, chart: Path) -> list[str]:
    """All images of values.yaml, for mirrors."""
    ours = root.child("image").default
    tag = ours["tag"] or yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    place = f"{ours['registry']}/{ours['repository']}"
    of_others = [root.child(*path, "image").default for path in _OF_OTHERS]
    return [
        *(f"{place}:{target}-{tag}" for target in TARGETS),
        *(f"{image['registry']}/{image['repository']}:{image['tag']}" for image in of_others),
    ]


def main() -> None:
    """Write them all."""
    for path, text in made().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
