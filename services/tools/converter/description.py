"""Writes a hub folder's description of a model: all files but the weights. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.compute.model.families.naming import Family
from services.compute.model.formats.gguf.hub_files import HubFiles


def write_description(config: Mapping[str, Any], family: Family, hub: HubFiles, out: Path) -> None:
    """Write config.json, tokenizer, template and generation settings into the folder `out`."""
    ids = {key: value for key, value in hub.generation_config.items() if key.endswith("_token_id")}
    write_json(out / "config.json", {**config, "model_type": family.model_type, **ids})
    hub.tokenizer.save(str(out / "tokenizer.json"))
    settings = dict(hub.tokenizer_config)
    template = settings.get("chat_template")
    if isinstance(template, str):
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
        del settings["chat_template"]
    write_json(out / "tokenizer_config.json", settings)
    write_json(out / "generation_config.json", hub.generation_config)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write an object, indented."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
