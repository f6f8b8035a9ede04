"""`ryzanstein models`, `check`, `quantize`, `convert`, `merge`: what is asked of checkpoints and made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

checkpoints = typer.Typer()


Method = Literal["gptq", "awq", "rtn"]
Bits = Literal["4", "8"]
Device = Literal["auto", "cpu", "cuda"]
WeightType = Literal["auto", "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


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
    from services.cli import quantize as command

    arguments = [model, "--out", str(out), "--method", method, "--bits", bits, "--extra", str(extra)]
    arguments += ["--samples", str(samples), "--length", str(length), "--device", device]
    arguments += ["--group", str(group)] if group is not None else []
    arguments += ["--calibration", str(calibration)] if calibration is not None else []
    arguments += ["--asymmetric"] if asymmetric else []
    command.QUANTIZER.run(arguments, str(out))


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
    from services.cli import convert as command

    arguments = [source, str(out), "--type", weights, "--shard-bytes", str(command.parse_size(shard_size))]
    command.CONVERTER.run([*arguments, *(["--force"] if force else [])], str(out))


@checkpoints.command()
def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A checkpoint folder or a hub id.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The folder of a LoRA adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
) -> None:
    """Merge a LoRA adapter into its base: also DoRA, biases, embeddings and modules that were trained whole."""
    from services.cli import merge as command

    command.MERGER.run([base, str(adapter), str(out)], str(out))
