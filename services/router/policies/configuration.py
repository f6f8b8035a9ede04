"""Reads policies as operators write them: the name of a preset, or a composition in JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import NoDecode

from services.router.policies.registry import PARTS, Composition, PolicyName


def read_policy(value: object) -> object:
    """The name of a preset, or the composition of a JSON text or map; raises ValueError, with what is allowed."""
    if isinstance(value, Composition) or value in get_args(PolicyName):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"it should be JSON, but {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"it should be {', '.join(get_args(PolicyName))}, or a map with {_keys(Composition)}")
    try:
        return Composition.model_validate(value)
    except ValidationError as error:
        raise ValueError("; ".join(_complaint(detail) for detail in error.errors())) from None


PolicySetting = Annotated[PolicyName | Composition, NoDecode, BeforeValidator(read_policy)]


def _complaint(error: ErrorDetails) -> str:
    """An error message that names the field and what is allowed there."""
    path: list[Any] = list(error["loc"])
    parts = [place for place in path if place in PARTS]  # the type of the part: pydantic adds it to the path
    field = ".".join(str(place) for place in path if place not in PARTS)
    match error["type"]:
        case "extra_forbidden":
            reason = f"is not known; allowed are {_keys(PARTS[parts[-1]] if parts else Composition)}"
        case "union_tag_invalid":
            field, reason = f"{field}.type", f"{error['ctx']['tag']!r} is not one of {error['ctx']['expected_tags']}"
        case "union_tag_not_found":
            reason = f"needs a type, one of {_types(path)}"
        case _:
            reason = error["msg"].replace("Input should", "it should")
    return f"{field}: {reason}"


def _types(path: list[Any]) -> str:
    kind = {"filters": "filters", "scorers": "scorers", "picker": "pickers"}[path[0]]
    return ", ".join(name for name, part in PARTS.items() if f".{kind}." in part.__module__)


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)
