"""Placement policies: filters, scorers and a picker; see README.md."""

from __future__ import annotations

from services.router.policies.registry import make_policy

__all__ = ["make_policy"]
