"""`ryzanstein models`, `check`, `quantize`, `convert`, `merge`: what is asked of checkpoints and made of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from services.cli.errors import CommandError

checkpoints = typer.Typer()


Method = Literal["gptq", "awq", "rtn"]
Bits = Literal["4", "8"]
Device = Literal["auto", "cpu", "cuda"]
WeightType = Literal["auto", "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(MB|GB|MIB|GIB)", re.IGNORECASE)
_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


@checkpoints.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List what can be served: families of models, formats of weights and of the KV cache, and what each needs."""
    from services.cli import check as command

    raise typer.Exit(command.run(["models", *(["--json"] if as_json else [])]))


@checkpoints.command("check")
def check_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, a GGUF file or a hub id.")],
    ranks: Annotated[str, typer.Option(metavar="N,...", help="Numbers of ranks to check.")] = "1",
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Say whether MODEL can be served and its memory, or every reason why not; ends with 0, 1, or 3 for some ranks."""
    from services.cli import check as command

    arguments = ["check", model, "--ranks", command.parse_counts(ranks), "--device", device]
    raise typer.Exit(command.run([*arguments, *(["--json"] if as_json else [])]))


@checkpoints.command()
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder or a hub id.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write; must not exist.")],
    method: Annotated[Method, typer.Option(help="GPTQ, AWQ, or rounding to nearest.")] = "gptq",
    bits: Annotated[Bits, typer.Option(help="Bits of most layers.")] = "4",
    group: Annotated[
        int | None,
        typer.Option(
            min=32, help="Inputs that share a scale; default: a scale per output with 8 bits, else 128, 64 or 32."
        ),
    ] = None,
    extra: Annotated[
        float,
        typer.Option(
            min=0, max=0.9, help="With 4 bits, share of bytes to add by layers in 8 bits: where the error falls most."
        ),
    ] = 0.1,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="With 4 bits, store a zero for each group: a smaller error.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text, or .jsonl with the field text; default: Python's help topics."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of the calibration's text.")] = 128,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a piece.")] = 512,
    device: Annotated[Device, typer.Option(help="auto: a GPU if there is one.")] = "auto",
) -> None:
    """Quantize MODEL's weights into a checkpoint of compressed-tensors; run it again after a kill, and it goes on."""
    from services.cli.worker_program import QUANTIZER

    scheme = {"method": method, "bits": int(bits), "group": group, "extra": extra, "symmetric": not asymmetric}
    texts = {"calibration": calibration and str(calibration), "samples": samples, "length": length}
    QUANTIZER.run(out=out, model=model, device=device, **scheme, **texts)


@checkpoints.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A checkpoint folder, a GGUF file or a hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, or a name that ends with .gguf.")],
    weights: Annotated[
        WeightType,
        typer.Option(
            "--type", case_sensitive=False, help="Type of matrices; auto: IN's dtype. A folder takes F32, F16 and BF16."
        ),
    ] = "auto",
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of a folder.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.")] = False,
) -> None:
    """Convert a GGUF file to a folder of safetensors, or a folder to a GGUF file, with tokenizer and template."""
    from services.cli.worker_program import CONVERTER

    CONVERTER.run(out=out, source=source, kind=weights, shard_bytes=_parse_size(shard_size), force=force)


def _parse_size(text: str) -> int:
    """Return a size such as 5GB in bytes; raises CommandError."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not size:
        raise CommandError(f"--shard-size {text}: expected a number above 0 with MB, GB, MiB or GiB, such as 5GB")
    return size


@checkpoints.command()
def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A checkpoint folder or a hub id.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The folder of a LoRA adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
) -> None:
    """Merge a LoRA adapter into its base: also DoRA, biases, embeddings and modules that were trained whole."""
    from services.cli.worker_program import MERGER

    MERGER.run(out=out, base=base, adapter=str(adapter))
