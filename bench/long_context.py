"""Measures what narrowed attention costs in quality: perplexity of long texts, and retrieval of facts.

    python -m bench.long_context MODEL --lengths 8192,16384,32768 --out docs/long-context.md

The beginning of a text, with facts planted at ten depths, is computed as a prompt, the last `--forced` tokens one by
one as decodes, in every mode over the same keys. In their place, a question and its answer are decodes as well: a fact
counts as retrieved if each token of its answer is the likeliest one. Without `--text` the texts are sources of Python's
standard library.

All modes decode the same tokens, so the cost of a mode is the mean of differences by token, with its standard error.
"""

from __future__ import annotations

import math
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer
from torch import Tensor

from bench.evaluation.forced import ForcedModel
from bench.evaluation.report import replace_between
from bench.reading import Reading, higher, lower, write_readings
from services.common.attention import AttentionMode
from services.worker.native.startup import read_model

DEPTHS = 10
_QUESTION = 64  # room for a question and its answer
_MODES = "dense; window(64, 1024); window(64, 4096); top_k(64); top_k(128); top_k(256)"


@dataclass(frozen=True)
class Fact:
    """A sentence in the text, and what is asked of it."""

    name: str
    code: str

    @property
    def sentence(self) -> str:
        """The planted text."""
        return f"\nThe access code of {self.name} is {self.code}.\n"

    @property
    def question(self) -> str:
        """The beginning of the sentence, which the answer completes."""
        return f"\nThe access code of {self.name} is "


@dataclass(frozen=True)
class Quality:
    """The results of one mode at one length."""

    length: int
    mode: AttentionMode
    losses: Tensor  # [n] of the forced tokens of all texts
    n_retrieved: int
    n_facts: int

    @property
    def perplexity(self) -> float:
        """That of all texts."""
        return math.exp(float(self.losses.mean()))

    def cost(self, dense: Quality) -> str:
        """The perplexity, relative to that of dense attention, with the standard error."""
        differences = self.losses - dense.losses
        error = float(differences.std()) / math.sqrt(len(differences))
        return f"{100 * math.expm1(float(differences.mean())):+.1f} ± {100 * error:.1f} %"


def library_text() -> str:
    """The sources of Python's standard library, one after the other."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join(file.read_text(errors="ignore") for file in sorted(folder.glob("*.py")))


def make_facts(seed: int) -> list[Fact]:
    """One fact for each depth."""
    rng = random.Random(seed)
    names = ["Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel", "Ironwood", "Juniper"]
    return [Fact(f"{name} station", f"{rng.randrange(10**5, 10**6)}") for name in names]


@dataclass(frozen=True)
class Measuring:
    """One model and its tokenizer."""

    model: ForcedModel
    tokenizer: Tokenizer
    start: tuple[int, ...]  # tokens at the beginning of a text
    modes: Sequence[AttentionMode]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def measure(self, token_ids: Sequence[int], facts: Sequence[Fact], forced: int) -> Iterator[tuple[Tensor, int]]:
        """Yield the losses [forced] of the last tokens, and the number of retrieved facts, in each mode."""
        room = max(forced + 1, _QUESTION)  # the decode of the first row draws the first forced token
        prompt = [*self.start, *self._planted(token_ids[:-room], facts)]
        text = [*prompt, *token_ids[-room:][: forced + 1]]
        self.model.prefill(prompt)
        for mode in self.modes:
            losses = self._losses(text, len(prompt), mode)
            yield losses, sum(self._answers(prompt, fact, mode) for fact in facts)

    def _planted(self, token_ids: Sequence[int], facts: Sequence[Fact]) -> list[int]:
        """As many tokens of a text, with the facts at even depths."""
        planted = [self.encode(fact.sentence) for fact in facts]
        own = len(token_ids) - sum(map(len, planted))  # tokens of the text itself
        text: list[int] = []
        for index, sentence in enumerate(planted):
            low, high = (own * (index + step) // len(facts) for step in (0, 1))
            text += [*token_ids[low : (low + high) // 2], *sentence, *token_ids[(low + high) // 2 : high]]
        return text

    def _losses(self, text: Sequence[int], n_prompt: int, mode: AttentionMode) -> Tensor:
        losses, at = list[Tensor](), n_prompt + 1
        for logits in self.model.decodes(text[:-1], n_prompt, mode):  # a row for each token of a large vocabulary
            drawn = torch.tensor(text[at : at + len(logits)])
            losses.append(-logits.log_softmax(-1)[torch.arange(len(logits)), drawn])
            at += len(logits)
        return torch.cat(losses)

    def _answers(self, text: list[int], fact: Fact, mode: AttentionMode) -> bool:
        question, whole = self.encode(fact.question.rstrip()), self.encode(fact.question + fact.code)
        forced = [*text, *whole]
        first = len(text) + len(question)  # position of the answer's first token
        at = len(text) + 1
        for logits in self.model.decodes(forced[:-1], len(text), mode):
            for best in logits.argmax(-1).tolist():
                if at >= first and forced[at] != best:
                    return False
                at += 1
        return True


def table(results: Sequence[Quality]) -> str:
    """Return the results as a table in Markdown."""
    lengths = sorted({result.length for result in results})
    head = [
        "mode",
        *(f"perplexity at {length:,}" for length in lengths),
        *(f"facts at {length:,}" for length in lengths),
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for mode in dict.fromkeys(result.mode for result in results):
        own = [next(one for one in results if (one.mode, one.length) == (mode, length)) for length in lengths]
        dense = [next(one for one in results if (one.mode.name, one.length) == ("dense", length)) for length in lengths]
        cells = [
            f"{one.perplexity:.3f}" + (f" ({one.cost(base)})" if one is not base else "")
            for one, base in zip(own, dense, strict=True)
        ]
        lines.append(f"| `{mode}` | {' | '.join([*cells, *(f'{one.n_retrieved} of {one.n_facts}' for one in own)])} |")
    return "\n".join(lines)


def readings(results: Sequence[Quality]) -> Iterator[Reading]:
    """Yield the results as readings."""
    for one in results:
        name = f"long_context/{one.length}/{one.mode}"
        yield lower(f"{name}/perplexity", one.perplexity, "")
        yield higher(f"{name}/retrieved", one.n_retrieved, "facts")


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder or a GGUF file.")],
    lengths: Annotated[str, typer.Option(help="Tokens of a text; commas between.")] = "8192,16384,32768",
    forced: Annotated[int, typer.Option(min=1, help="Tokens at the end that are decodes.")] = 256,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 1,
    modes: Annotated[str, typer.Option(help="Dense first; semicolons between.")] = _MODES,
    kv_dtype: Annotated[str, typer.Option(help="KV format: int8; empty: the model's dtype.")] = "",
    text: Annotated[Path | None, typer.Option(help="A text in place of Python's sources.")] = None,
    seed: Annotated[int, typer.Option(help="Of the facts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the table into this page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write readings.")] = None,
) -> None:
    """Compare modes of attention at several lengths."""
    sizes, files = [int(length) for length in lengths.split(",")], read_model(model)
    tokenizer = Tokenizer.from_buffer(files.tokenizer.json)
    bos = tokenizer.token_to_id(files.tokenizer.special_tokens.get("bos_token", ""))
    start = (bos,) if files.tokenizer.add_bos_token and bos is not None else ()
    chosen = [AttentionMode.parse(mode) for mode in modes.split(";")]
    measuring = Measuring(ForcedModel(model, max(sizes), kv_dtype), tokenizer, start, chosen)
    token_ids = measuring.encode(text.read_text() if text else library_text())
    if len(token_ids) < texts * max(sizes):
        raise typer.BadParameter(f"the text has {len(token_ids):,} tokens, fewer than {texts} x {max(sizes):,}")
    results = []
    for size in sizes:
        began = time.monotonic()
        parts = [token_ids[index * max(sizes) :][: size - len(start)] for index in range(texts)]
        of_texts = [list(measuring.measure(part, make_facts(seed), forced)) for part in parts]
        for mode, *of_mode in zip(chosen, *of_texts, strict=True):
            losses, n_retrieved = zip(*of_mode, strict=True)
            results.append(Quality(size, mode, torch.cat(losses), sum(n_retrieved), texts * DEPTHS))
        typer.echo(f"{size:,} tokens: {time.monotonic() - began:.0f} s", err=True)
    written = table(results)
    print(written)
    if out:
        replace_between(out, f"attention of {model.stem}", written)
    if json_file:
        write_readings(json_file, readings(results))


if __name__ == "__main__":
    typer.run(main)
