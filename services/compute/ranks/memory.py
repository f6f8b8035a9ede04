"""The account of a worker's memory: bytes by purpose. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

_MIB = 1 << 20
_TORCHRUN = 176 * _MIB  # the launcher of several ranks
_SERVER = 96 * _MIB  # memory that the server allocates after a start is checked


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes that serving takes, of one rank or of a whole worker: predicted before a start, mostly measured after it.

    Each purpose counts at its largest: the largest step, full slots of adapters, full tiers.
    """

    process: int = 0  # a rank before it loads the model
    weights: int = 0  # including tables of positions
    images: int = 0  # the encoder of images
    workspace: int = 0  # the largest step
    graphs: int = 0  # captured steps, on GPUs
    kv: int = 0
    states: int = 0  # recurrent states of requests and snapshots
    adapters: int = 0
    host_cache: int = 0  # KV blocks in the host's memory
    server: int = 0  # the server process, and the launcher of several ranks

    def __add__(self, other: MemoryAccount) -> MemoryAccount:
        """The sums by purpose."""
        return MemoryAccount(**{name: size + getattr(other, name) for name, size in asdict(self).items()})

    @property
    def total(self) -> int:
        """Bytes of all purposes."""
        return sum(asdict(self).values())

    def parts(self) -> Mapping[str, int]:
        """Bytes by purpose, without those that take none."""
        return {name: size for name, size in asdict(self).items() if size}

    def explain(self) -> str:
        """Return the parts as a text, in MiB."""
        return ", ".join(f"{name.replace('_', ' ')} {in_mib(size)}" for name, size in self.parts().items())


def worker_account(on_ranks: MemoryAccount, n_ranks: int, host_cache: int) -> MemoryAccount:
    """Return a worker's account from the sum of its ranks' and the bytes of its host tier."""
    server = _SERVER + (_TORCHRUN if n_ranks > 1 else 0)
    return on_ranks + MemoryAccount(host_cache=host_cache, server=server)


def in_mib(size: int) -> str:
    """Return a size in MiB, rounded up."""
    return f"{-(-size // _MIB):,}"
