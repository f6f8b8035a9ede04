"""Runs inside the build of the simulator: replaces a model's GGUF file by the files of a folder without weights.

``without_weights.py FOLDER``. Values of a generation_config.json in the folder outweigh the file's own, as for workers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from services.compute.model.families.config import Config
from services.compute.model.formats.gguf.hub_files import hub_files
from services.compute.model.registry import describe, interpret
from services.tools.converter.description import write_description


def describe_only(folder: Path) -> None:
    """Write the description of the only GGUF file in `folder`, and remove that file. Raises ModelError."""
    [file] = folder.glob("*.gguf")
    description = describe(file)
    assert description.gguf is not None, "the file is one of GGUF"
    family, _ = interpret(Config(description.config.values, file))
    hub, chosen = hub_files(description.gguf.metadata), folder / "generation_config.json"
    own = json.loads(chosen.read_text()) if chosen.is_file() else {}
    hub = replace(hub, generation_config=hub.generation_config | own)
    write_description(description.config.values, family, hub, folder)
    file.unlink()


if __name__ == "__main__":
    describe_only(Path(sys.argv[1]))
