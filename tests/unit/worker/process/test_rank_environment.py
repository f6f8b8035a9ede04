"""The environment of ranks."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from services.compute.ranks.config import RankGroupConfig
from services.worker.process.launcher import launch_command, rank_environment
from services.worker.protocol.rank_config import RankSettings, ServerEndpoint


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(1, 2, "2"), (2, 2, "1"), (4, 2, "1"), (3, 16, "5")])
def test_ranks_share_the_cores_and_the_operator_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, threads: str
) -> None:
    for name in ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    config = RankGroupConfig("model", ranks=ranks, kv_tokens=1024)
    settings = RankSettings(config, ServerEndpoint(1, 2, 3, 0.0))
    assert rank_environment(settings, cores)["OMP_NUM_THREADS"] == threads
    assert int(rank_environment(settings, cores)["MALLOC_TRIM_THRESHOLD_"]) >= 1 << 30
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    changed = rank_environment(settings, cores)
    assert (changed["OMP_NUM_THREADS"], changed["MALLOC_TRIM_THRESHOLD_"]) == ("7", "131072")


def test_rendezvous_of_ranks_resolves_no_name() -> None:
    """A container without /etc/hosts waits for a name server at each name."""
    options = dict(option.split("=", 1) for option in launch_command(2, "m") if "=" in option)
    host, _, _ = options["--rdzv-endpoint"].rpartition(":")
    assert ip_address(host).is_loopback
    assert ip_address(options["--local-addr"]).is_loopback
