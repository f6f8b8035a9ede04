"""Reads the chat template of a checkpoint, which may have a second one for requests with tools. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.templates import compile_template
from services.compute.model.files import refuse_pointer
from services.compute.model.spec import ModelError

_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_NO_DEFAULT = "{{ raise_exception('the model has a template for requests with tools alone') }}"


def read_chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    """Return one template for all requests; "" if there is none.

    Newer repositories keep templates in separate files, older ones in tokenizer_config.json; files take precedence.
    Raises ModelError naming the file of an invalid template, because gateways could only refuse the whole model.
    """
    return _joined(_from_files(folder) or _from_config(folder / "tokenizer_config.json", tokenizer_config))


def chat_template_of(file: Path, tokenizer_config: dict[str, Any]) -> str:
    """Return the template in `tokenizer_config`, which `file` holds. Raises ModelError as `read_chat_template` does."""
    return _joined(_from_config(file, tokenizer_config))


def _joined(named: dict[str, str]) -> str:
    default, tool_use = named.get("default", ""), named.get("tool_use", "")
    if not tool_use:
        return default
    # Jinja drops a newline at the end of a template; `+` keeps the others around these tags.
    parts = [part.removesuffix("\n") for part in (tool_use, default or _NO_DEFAULT)]
    return "{% if tools +%}" + parts[0] + "{%+ else +%}" + parts[1] + "{%+ endif %}"


def _from_files(folder: Path) -> dict[str, str]:
    files = {"default": folder / _FILE} | {file.stem: file for file in sorted((folder / _FOLDER).glob("*.jinja"))}
    templates = {}
    for name, file in files.items():
        try:
            if file.is_file():
                refuse_pointer(file)
                templates[name] = _checked(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{file}: {error}") from error
    return templates


def _from_config(file: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    value = tokenizer_config.get("chat_template") or ""
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    templates = {}
    try:
        for entry in entries:
            if not isinstance(entry, dict) or not {"name", "template"} <= entry.keys():
                raise ValueError("chat_template: each of several must be an object with `name` and `template`")
            if not isinstance(entry["template"], str):
                kind = type(entry["template"]).__name__
                raise ValueError(f"chat_template must be a text or a list of named ones, not {kind}")
            templates[str(entry["name"])] = _checked(entry["template"])
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error
    return templates


def _checked(template: str) -> str:
    if template:
        compile_template(template)
    return template
