"""Measures what an attacker could learn from the time of a refused API key, and how long a revoked one still works.

    python -m bench.keys [--tries 100000] [--revocations 20]

Each try is a new wrong secret that shares none, half or all but one of its characters with the right one, in random
order. Welch's t compares each kind with the first; beyond 4.5 their times count as different (the threshold of ISO/IEC
17825). An id that does not exist is a kind of its own: it is looked up in vain, which shows, and ids are no secret.
Revocations are measured from the end of `ryzanstein keys revoke` until two gateways with one Redis refuse the key,
which both have just accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.common.keys import RedisKeys
from services.gateway.errors import ApiError
from services.gateway.tenants.issued import IssuedKey, PresentedKey, new_id, new_secret
from services.gateway.tenants.keys import KeyDirectory
from tests.integration.gateway.test_issued_keys import installation

DIFFERENT = 4.5
_LETTERS = string.ascii_letters + string.digits + "-_"
OUTLIERS = 0.9  # slower tries were interrupted
POLL_S = 0.01


def wrong(key: PresentedKey, shared: int) -> PresentedKey:
    """A key whose secret has the first `shared` characters of the right one, then another one, then any."""
    differs = random.choice(_LETTERS.replace(key.secret[shared], ""))
    rest = random.choices(_LETTERS, k=len(key.secret) - shared - 1)
    return PresentedKey(key.id, "".join((key.secret[:shared], differs, *rest)))


async def refusals(tries: int) -> dict[str, np.ndarray]:
    """Nanoseconds of each refusal, by what the wrong key shares with the right one."""
    secret, hashed = new_secret()
    right = PresentedKey(new_id(), secret)
    fixed = {right.id: IssuedKey(id=right.id, name="t", secrets=(hashed,))}
    directory = KeyDirectory(fixed, None, RedisKeys("bench"))
    kinds: dict[str, Callable[[], PresentedKey]] = {
        "nothing": lambda: wrong(right, 0),
        "half": lambda: wrong(right, len(secret) // 2),
        "all but one character": lambda: wrong(right, len(secret) - 1),
        "the secret, not the id": lambda: PresentedKey(new_id(), secret),
    }
    # All are made before the first is tried: making them would leave each kind another cache.
    tried = [(kind, str(make())) for kind, make in kinds.items() for _ in range(tries)]
    random.shuffle(tried)
    taken: dict[str, list[int]] = {kind: [] for kind in kinds}
    for kind, key in tried:
        began = time.perf_counter_ns()
        try:
            await directory.identify(key)
        except ApiError:
            taken[kind].append(time.perf_counter_ns() - began)
    return {kind: np.array(some) for kind, some in taken.items()}


def compared(taken: dict[str, np.ndarray]) -> list[str]:
    """A line for each kind: its mean, and Welch's t of its difference to the first."""
    kept = {kind: some[some <= np.quantile(some, OUTLIERS)] for kind, some in taken.items()}
    first = next(iter(kept.values()))
    lines = []
    for kind, some in kept.items():
        error = (some.var() / some.size + first.var() / first.size) ** 0.5
        t = (some.mean() - first.mean()) / error
        said = "different" if abs(t) > DIFFERENT else "the same"
        lines.append(f"{kind:28} {taken[kind].size:8} tries  {some.mean():8.1f} ns  t {t:+6.2f}  {said}")
    return lines


async def revocations(count: int, folder: Path) -> list[float]:
    """Seconds from the end of each revocation until both gateways refuse the key."""
    waits = []
    async with installation(folder) as there:
        for _ in range(count):
            key = await there.keys("create", "acme")
            urls = (there.first.url, there.second)
            if [await there.status(key, url) for url in urls] != [200, 200]:
                raise RuntimeError("a new key is refused")
            await there.keys("revoke", key.split("-")[1])
            revoked = time.monotonic()
            for url in urls:
                while await there.status(key, url) != 401:  # noqa: ASYNC110  # gateways do not announce it
                    await asyncio.sleep(POLL_S)
            waits.append(time.monotonic() - revoked)
    return waits


def main() -> None:
    """Parse the options, measure, and show the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=100_000, help="of each kind of wrong key")
    parser.add_argument("--revocations", type=int, default=20)
    options = parser.parse_args()
    print("\n".join(compared(asyncio.run(refusals(options.tries)))))
    with tempfile.TemporaryDirectory() as folder:
        waits = asyncio.run(revocations(options.revocations, Path(folder)))
    print(f"revoked: refused by both gateways after {statistics.median(waits):.2f} s, at most {max(waits):.2f} s")


if __name__ == "__main__":
    main()
