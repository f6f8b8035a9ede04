"""Placement policies: one file each, all pure functions over a snapshot."""

from __future__ import annotations

from services.router.policies.cost import CostPolicy
from services.router.policies.least_loaded import LeastLoaded
from services.router.policies.round_robin import RoundRobin
from services.router.policies.session_hash import SessionHash
from services.router.policies.weighted import Weighted
from services.router.settings import PolicyName
from services.router.snapshot import Policy


def make_policy(name: PolicyName, decode_weight: float) -> Policy:
    """The policy of that name; raises KeyError for another."""
    policies: dict[str, Policy] = {
        "cost": CostPolicy(decode_weight),
        "round_robin": RoundRobin(),
        "weighted": Weighted(),
        "least_loaded": LeastLoaded(),
        "session_hash": SessionHash(),
    }
    return policies[name]
