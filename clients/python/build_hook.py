"""Hatchling's build hook: generates the gRPC stubs from the servers' contracts, and the blocking clients."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedModules(BuildHookInterface):  # type: ignore[type-arg]
    """A wheel has the generated modules, an sdist what they are generated from."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the modules, or add the contracts."""
        contracts = self._contracts()
        if self.target_name == "sdist":
            build_data["force_include"][str(contracts)] = "proto"
        else:
            generate = runpy.run_path(str(contracts / "build_stubs.py"))["build_stubs"]
            generate(Path(self.root) / "generated")
            runpy.run_path(str(Path(self.root) / "build_sync.py"))["build_sync"]()

    def _contracts(self) -> Path:
        """`proto` next to this file in an sdist, at the repository's root in a clone."""
        here = Path(self.root)
        places = (here / "proto", here.parent.parent / "proto")
        for folder in places:
            if (folder / "build_stubs.py").is_file():
                return folder
        raise RuntimeError(f"build in a clone or an sdist: no contracts in {places[0]} nor in {places[1]}")
