"""The table of formats: as Markdown between two marks of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.evaluation.formats import Row, stored_mib
from bench.evaluation.metrics import Comparison, Estimate

_HEAD = "| format | weights on disk, MiB | perplexity | ratio to float32 | top-1 agreement | mean KL, nats |"


def render(rows: Sequence[tuple[Row, Comparison]], model: str, window: int) -> str:
    """Return the table; every row is compared with the same checkpoint in float32."""
    first = rows[0][1]
    reference = _cell(first.reference_perplexity, "{:.3f}")
    lines = [
        f"`{model}`, {first.documents} documents, {first.tokens:,} tokens (the first {window} of each), CPU, one rank;",
        f"perplexity in float32: {reference}.",
        "",
        _HEAD,
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row, measured in rows:
        cells = [
            row.name,
            f"{stored_mib(row):.0f}",
            f"{measured.perplexity.value:.3f}",
            _cell(measured.perplexity_ratio, "{:.4f}"),
            _cell(measured.top1_agreement, "{:.2%}"),
            _cell(measured.kl_nats, "{:.1e}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(estimate: Estimate, pattern: str) -> str:
    value = pattern.format(estimate.value)
    if estimate.interval is None:
        return value
    low, high = (pattern.format(bound) for bound in estimate.interval)
    return f"{value} [{low}, {high}]"


def replace_between(page: Path, mark: str, text: str) -> None:
    """Replace the part of `page` between the comments `mark` and `end of mark`. Raises ValueError without them."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    whole = page.read_text()
    before, opened, rest = whole.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"{page}: no marks {begin.strip()} and {end.strip()}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
