"""llama.cpp's server of the package `xllamacpp`, with the options that `bench/peers.toml` gives a compiled one.

python -m bench.llama_server FILE.gguf --port 8080 --threads 2 --slots 1 --context 8192 --drafter ngram-simple
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
import xllamacpp

from bench.servers import LLAMA_DRAFTERS


def main(
    file: Annotated[Path, typer.Argument(help="A GGUF file.")],
    port: Annotated[int, typer.Option()],
    threads: Annotated[int, typer.Option(min=1)] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Requests computed at a time.")] = 64,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a slot.")] = 1_536,
    drafter: Annotated[str, typer.Option(help=f"One of {', '.join(LLAMA_DRAFTERS)}, with its defaults.")] = "none",
) -> None:
    """Serve FILE until SIGINT or SIGTERM."""
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server's threads are there
    params = xllamacpp.CommonParams()
    params.model.path, params.port = str(file), port
    params.n_parallel, params.n_ctx = slots, slots * context
    kind = f"COMMON_SPECULATIVE_TYPE_{drafter.upper().replace('-', '_')}"
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params, params.verbosity = False, -1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait(ends)


if __name__ == "__main__":
    typer.run(main)
