from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.common.keys import RedisKeys
from services.common.settings import ServiceSettings


def test_settings_come_from_the_environment_and_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_NAMESPACE", "blue")
    assert ServiceSettings().namespace == "blue"
    monkeypatch.setenv("RYZANSTEIN_METRICS_PORT", "70000")
    with pytest.raises(ValidationError, match="metrics_port"):
        ServiceSettings()


def test_peers_are_told_an_address_that_can_be_called() -> None:
    assert ServiceSettings(host="10.0.0.1").advertised(5) == "10.0.0.1:5"
    assert ServiceSettings(host="::1").advertised(5) == "[::1]:5"
    assert ServiceSettings(host="0.0.0.0", advertise_host="pod-0.workers").advertised(5) == "pod-0.workers:5"
    assert not ServiceSettings(host="0.0.0.0").advertised(5).startswith("0.0.0.0")


def test_installations_and_tenants_share_no_keys_and_sessions_are_not_stored_in_clear() -> None:
    keys = RedisKeys("blue")
    assert keys.leases == "rz:blue:leases"
    assert len({keys.session(t, s) for t, s in (("", "a"), ("t", "a"), ("t", "b"))}) == 3
    assert "secret name" not in keys.session("t", "secret name")
    assert RedisKeys("green").session("t", "a") != keys.session("t", "a")
