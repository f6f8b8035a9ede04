"""A plan as a picture: a panel for each variant, with a bar for each hour and a line for its interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from services.planner.rows import PlanRow

_BAR, _STEP = 18, 26  # widths of a bar, and of an hour
_PANEL, _TALL = 170, 100  # heights of a panel, and of its largest bar
_LEFT, _TOP = 40, 40
_WIDE = 320  # a panel's name needs so much
_COLOUR, _LINE, _TEXT = "#4477aa", "#bb5566", "#222222"


def picture(rows: Sequence[PlanRow]) -> str:
    """The plan in SVG. An hour without a plan has no bar, and the word none."""
    panels: dict[tuple[str, str, str], list[PlanRow]] = {}
    for row in rows:
        panels.setdefault((row.curve, row.policy, row.tier), []).append(row)
    most = max((row.need.high or row.need.workers or 1 for row in rows), default=1)
    width = max(_WIDE, 2 * _LEFT + _STEP * max(map(len, panels.values()), default=0))
    body = [
        part
        for number, (variant, hours) in enumerate(panels.items())
        for part in _panel(variant, hours, most, number * _PANEL)
    ]
    size = f'width="{width}" height="{_PANEL * len(panels)}"'
    font = f'font-family="sans-serif" font-size="11" fill="{_TEXT}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *body, "</svg>", ""])


def _panel(variant: tuple[str, str, str], hours: Sequence[PlanRow], most: int, top: int) -> Iterator[str]:
    curve, policy, tier = variant
    name = f"{Path(curve).stem}, {policy}" + (f", tier {tier}" if tier != "none" else "")
    base = top + _TOP + _TALL
    yield _text(_LEFT, top + 16, f"Workers by hour: {name}")
    yield f'<line x1="{_LEFT - 4}" y1="{base}" x2="{_LEFT + _STEP * len(hours)}" y2="{base}" stroke="{_TEXT}"/>'
    for number, row in enumerate(hours):
        yield from _bar(row, _LEFT + _STEP * number, base, _TALL / most)


def _bar(row: PlanRow, left: int, base: int, scale: float) -> Iterator[str]:
    middle, need = left + _BAR / 2, row.need
    if need.workers is not None:
        tall = need.workers * scale
        place = f'x="{left}" y="{base - tall:.1f}" width="{_BAR}" height="{tall:.1f}"'
        yield f'<rect class="hour" {place} fill="{_COLOUR}"><title>{escape(row.hour)}</title></rect>'
    if need.low is not None and need.high is not None and need.low < need.high:
        ends = f'y1="{base - need.low * scale:.1f}" y2="{base - need.high * scale:.1f}"'
        yield f'<line class="interval" x1="{middle}" x2="{middle}" {ends} stroke="{_LINE}" stroke-width="2"/>'
    tallest = max(need.workers or 0, need.high or 0)
    yield _text(middle, base - tallest * scale - 4, str(need.workers or "none"), "middle")
    hour = row.hour.partition(" ")[2].partition(":")[0] if ":" in row.hour else row.hour
    yield _text(middle, base + 14, hour, "middle")


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
