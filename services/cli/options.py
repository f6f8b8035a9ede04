"""Options that several commands have, or that are a value of their own: fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any


def option_parameters(kind: type) -> list[Parameter]:
    """The fields of a dataclass that are options, as parameters of a function."""
    parameters = signature(kind, eval_str=True).parameters.values()
    return [each for each in parameters if hasattr(each.annotation, "__metadata__")]


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter of a command that is a dataclass by the dataclass's options, for Typer to read."""
    parameters = signature(command, eval_str=True).parameters
    annotations: dict[str, Any] = {name: each.annotation for name, each in parameters.items()}
    kinds = {name: kind for name, kind in annotations.items() if isinstance(kind, type) and is_dataclass(kind)}
    options = {name: option_parameters(kind) for name, kind in kinds.items()}

    def run(**given: Any) -> None:
        made = {
            name: kind(**{each.name: given.pop(each.name) for each in options[name]}) for name, kind in kinds.items()
        }
        command(**made, **given)

    flat = (option for name, each in parameters.items() for option in options.get(name, [each]))
    update_wrapper(run, command)
    run.__signature__ = Signature([each.replace(kind=Parameter.KEYWORD_ONLY) for each in flat])  # type: ignore[attr-defined]
    return run
