"""`ryzanstein check` of a hub id: its answer for programs, from the small files alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from services.cli.stack.default_model import TINY_MODEL
from tests.integration.cli.hub import Hub, running

PROGRAM = str(Path(sys.executable).with_name("ryzanstein"))


def test_a_hub_id_is_checked_without_its_weights(tmp_path: Path) -> None:
    """Of three numbers of ranks one does not work: 3."""
    files = {path.name: path.read_bytes() for path in TINY_MODEL.iterdir() if path.is_file()}
    with running(Hub(files)) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": str(tmp_path)}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [PROGRAM, "check", hub.repository, "--ranks", "1,2,7", "--device", "cpu", "--json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        report = json.loads(done.stdout)
        assert (done.returncode, report["servable"], report["problems"]) == (3, False, []), done.stderr
        problems = {each["ranks"]: each["problem"] for each in report["ranks"]}
        assert (problems[1], problems[2]) == ("", "")
        assert "1, 2, 4 or 8 ranks work" in problems[7]
        assert report["nearest"] == ["--tensor-parallel 4"]
        assert hub.sent["config.json"] == 1
        assert not hub.sent["model.safetensors"]
