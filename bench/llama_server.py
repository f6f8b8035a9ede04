"""llama.cpp's server of the package `xllamacpp`, with the options that `bench/peers.toml` gives a compiled one.

python -m bench.llama_server FILE.gguf --port 8080 --threads 2
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer
import xllamacpp

_SLOTS = 64
_CONTEXT = 1_536 * _SLOTS


def main(
    file: Annotated[Path, typer.Argument(help="A GGUF file.")],
    port: Annotated[int, typer.Option()],
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Serve FILE until SIGINT or SIGTERM."""
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server's threads are there
    params = xllamacpp.CommonParams()
    params.model.path, params.port = str(file), port
    params.n_parallel, params.n_ctx = _SLOTS, _CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params, params.verbosity = False, -1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait(ends)


if __name__ == "__main__":
    typer.run(main)
