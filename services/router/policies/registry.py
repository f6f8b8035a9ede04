"""Finds all parts of policies in their folders, and defines the policies that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from operator import or_
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.router.policies import filters, pickers, scorers
from services.router.policies.base import Filter, Picker, PolicyPart, Scorer
from services.router.policies.filters.affordable import Affordable
from services.router.policies.filters.hash_session import HashSession
from services.router.policies.filters.keep_session import KeepSession
from services.router.policies.filters.least import Least
from services.router.policies.filters.spare import Spare
from services.router.policies.pickers.lowest_cost import LowestCost
from services.router.policies.pickers.rendezvous import Rendezvous
from services.router.policies.pickers.round_robin import RoundRobin, WeightedRoundRobin
from services.router.policies.policy import Policy
from services.router.policies.scorers.adapter_load import AdapterLoad
from services.router.policies.scorers.decode_time import DecodeTime
from services.router.policies.scorers.time_to_first_token import TimeToFirstToken


def _find(folder: ModuleType, kind: type[PolicyPart]) -> Mapping[str, type[PolicyPart]]:
    """The parts that the files of a folder define, by type, in the files' order."""
    modules = [import_module(f"{folder.__name__}.{file.name}") for file in iter_modules(folder.__path__)]
    parts = (part for module in modules for part in vars(module).values() if _is_own(part, kind, module))
    return MappingProxyType({part.model_fields["type"].default: part for part in parts})


def _is_own(part: object, kind: type[PolicyPart], module: ModuleType) -> bool:
    return isinstance(part, type) and issubclass(part, kind) and part.__module__ == module.__name__


_FILTERS, _SCORERS, _PICKERS = _find(filters, Filter), _find(scorers, Scorer), _find(pickers, Picker)
# All parts by type, filters first.
PARTS: Mapping[str, type[PolicyPart]] = MappingProxyType({**_FILTERS, **_SCORERS, **_PICKERS})

if TYPE_CHECKING:
    AnyFilter = Filter
    AnyScorer = Scorer
    AnyPicker = Picker
else:  # pydantic distinguishes the members of a union by their type
    AnyFilter = Annotated[reduce(or_, _FILTERS.values()), Field(discriminator="type")]
    AnyScorer = Annotated[reduce(or_, _SCORERS.values()), Field(discriminator="type")]
    AnyPicker = Annotated[reduce(or_, _PICKERS.values()), Field(discriminator="type")]


class Composition(BaseModel):
    """The configuration of a policy."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1, max_length=40)] = "composed"
    """The policy's name in `Explain`, traces and `ryzanstein status`."""
    filters: tuple[AnyFilter, ...] = ()
    """Narrow the workers down, in this order."""
    scorers: Annotated[tuple[AnyScorer, ...], Field(min_length=1)] = (TimeToFirstToken(), DecodeTime(), AdapterLoad())
    """Give each worker a cost: their weighted sum, in milliseconds."""
    picker: AnyPicker = LowestCost()
    """Takes one of the remaining workers."""


PolicyName = Literal["cost", "round_robin", "weighted", "least_loaded", "session_hash"]


def preset(name: PolicyName) -> Composition:
    """The composition of a preset; raises KeyError for an unknown name."""
    fewest = (Least(of="requests"), Least(of="queued_tokens"), Least(of="work"))
    filters: dict[PolicyName, tuple[AnyFilter, ...]] = {"cost": _sticky(), "least_loaded": fewest}
    pickers: dict[PolicyName, AnyPicker] = {
        "cost": LowestCost(),
        "round_robin": RoundRobin(),
        "weighted": WeightedRoundRobin(),
        "least_loaded": Rendezvous(by="request", reason="least loaded"),
        "session_hash": Rendezvous(),
    }
    return Composition(name=name, filters=filters.get(name, ()), picker=pickers[name])


def _sticky() -> tuple[AnyFilter, ...]:
    """A session stays at its worker while that is cheap. A session that starts or moves evens the work out.

    It goes to the worker with the least recent work, among workers near the cheapest that have less than their share
    of the requests now. A starting session leaves no cache behind, so this is the cheapest time to even work out.
    """
    return (
        KeepSession(sessions_only=True),
        HashSession(sessions_only=True),
        Affordable(sessions_only=True, busy_only=True),
        Spare(sessions_only=True),
        Least(of="work", within=0.01, sessions_only=True),
    )


def make_policy(policy: PolicyName | Composition) -> Policy:
    """The policy of a preset or of a composition; raises KeyError for an unknown preset."""
    made = policy if isinstance(policy, Composition) else preset(policy)
    return Policy(made.name, made.filters, made.scorers, made.picker)
