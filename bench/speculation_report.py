"""Results of bench.speculation: ratios, differences of texts, accepted drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from bench.reading import Reading, higher
from bench.stats import median


@dataclass(frozen=True)
class Answer:
    """The text of an answer, its length, and its end."""

    text: str
    n_tokens: int
    finish_reason: str


@dataclass(frozen=True)
class Totals:
    """Counts of a server: proposed and accepted tokens by drafter, seconds from requests to their first tokens."""

    proposed: Counter[str]
    accepted: Counter[str]
    prompts_s: float

    def since(self, earlier: Totals) -> Totals:
        """The differences to earlier totals of the same server."""
        prompts_s = self.prompts_s - earlier.prompts_s
        return Totals(self.proposed - earlier.proposed, self.accepted - earlier.accepted, prompts_s)


@dataclass(frozen=True)
class Run:
    """Requests that ran together."""

    answers: Sequence[Answer]
    seconds: float  # sum of the times of all answers over the number at once
    totals: Totals

    @property
    def n_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(answer.n_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all clients together, while none of them pauses."""
        return self.n_tokens / self.seconds

    @property
    def decoded_per_s(self) -> float:
        """The same without the time to first tokens; defined where no two requests ran at a time."""
        return self.n_tokens / (self.seconds - self.totals.prompts_s)


@dataclass
class Cell:
    """A workload at a concurrency: a run of each side in every round."""

    workload: str
    concurrency: int
    repeated: list[float] = field(default_factory=list)  # share of each answer's 8-grams that stand in its source
    on: list[Run] = field(default_factory=list)
    off: list[Run] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The workload and the concurrency."""
        return f"{self.workload}, {self.concurrency} at once" if self.concurrency > 1 else f"{self.workload}, alone"

    @property
    def decode_ratio(self) -> float:
        """The ratio without prompts; 0.0 where several requests ran at a time."""
        if self.concurrency > 1:
            return 0.0
        return median([on.decoded_per_s / off.decoded_per_s for on, off in zip(self.on, self.off, strict=True)])

    @property
    def ratio(self) -> float:
        """Speed with speculation over speed without, the median over the rounds."""
        return median([on.tokens_per_s / off.tokens_per_s for on, off in zip(self.on, self.off, strict=True)])

    def differences(self) -> Iterator[str]:
        """Yield a line for each answer that differs between the sides, with both texts from there on."""
        for turn, runs in enumerate(zip(self.on, self.off, strict=True), 1):
            for index, (on, off) in enumerate(zip(*(run.answers for run in runs), strict=True)):
                if on != off:
                    at = equal_characters(on.text, off.text)
                    parts = " and ".join(
                        f"{each.text[at : at + 40]!r} ({each.n_tokens} tokens, {each.finish_reason})"
                        for each in (on, off)
                    )
                    yield f"{self.name}, round {turn}, request {index}: after {at} characters {parts}"


def equal_characters(one: str, other: str) -> int:
    """The length of the common beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def speed_table(model: str, cells: Sequence[Cell]) -> Table:
    """A row for each cell: speeds, ratio, repeated share, accepted drafts."""
    table = Table(title=f"{model}: output tokens/s with speculation and without, medians over rounds")
    for column in (
        "requests",
        "on",
        "off",
        "ratio",
        "without prompts",
        "in the source",
        "accepted of proposed tokens, by drafter",
    ):
        table.add_column(column)
    for cell in cells:
        on, off = (median([run.tokens_per_s for run in runs]) for runs in (cell.on, cell.off))
        share = sum(cell.repeated) / len(cell.repeated) if cell.repeated else 0.0
        table.add_row(
            cell.name,
            f"{on:,.1f}",
            f"{off:,.1f}",
            f"{cell.ratio:.2f}",
            f"{cell.decode_ratio:.2f}" if cell.decode_ratio else "",
            f"{share:.0%}" if share else "",
            drafts(cell.on),
        )
    return table


def drafts(runs: Sequence[Run]) -> str:
    """The accepted and proposed tokens of all runs, by drafter."""
    proposed, accepted = Counter[str](), Counter[str]()
    for run in runs:
        proposed.update(run.totals.proposed)
        accepted.update(run.totals.accepted)
    parts = [f"{name} {accepted[name]:,} of {n:,} ({accepted[name] / n:.0%})" for name, n in proposed.items() if n]
    return ", ".join(parts) or "none proposed"


def peer_table(cell: Cell, peers: Mapping[str, Sequence[Run]]) -> Table:
    """A row for each server: its speed, and ours with speculation over it."""
    table = Table(title=f"{cell.name}: output tokens/s, medians over rounds")
    for column in (
        "server",
        "tokens/s",
        "ours over it",
        "without prompts",
        "ours over it",
        "accepted of proposed tokens",
    ):
        table.add_column(column)
    ours, decoded = _speeds(cell.on)
    for name, runs in {"ours, with speculation": cell.on, "ours, without": cell.off, **peers}.items():
        speed, after = _speeds(runs)
        cells = f"{speed:,.1f}", f"{ours / speed:.2f}", f"{after:,.1f}", f"{decoded / after:.2f}"
        table.add_row(name, *cells, drafts(runs))
    return table


def _speeds(runs: Sequence[Run]) -> tuple[float, float]:
    """Output tokens/s with prompts and without, the medians."""
    return median([run.tokens_per_s for run in runs]), median([run.decoded_per_s for run in runs])


def readings(model: str, cells: Sequence[Cell], peers: Mapping[str, Sequence[Run]]) -> Iterator[Reading]:
    """Yield the speeds and ratios of all cells, and the speeds of llama.cpp."""
    for cell in cells:
        name = f"speculation/{model}, {cell.name}"
        for side, runs in (("on", cell.on), ("off", cell.off)):
            yield higher(f"{name}/{side}", median([run.tokens_per_s for run in runs]), "tokens/s")
        yield higher(f"{name}/on over off", cell.ratio, "ratio")
    for peer, runs in peers.items():
        yield higher(f"speculation/{model}, {peer}/edit, alone", median([r.tokens_per_s for r in runs]), "tokens/s")
