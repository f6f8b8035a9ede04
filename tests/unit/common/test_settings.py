from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.common.keys import RedisKeys
from services.common.lifecycle import StartupError, read_settings
from services.common.settings import ServiceSettings
from services.common.tls.issuing import Authority
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings
from tests.shell import captured

SERVICES = ("gateway", "router", "kv_coordinator", "worker")


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
    for redis in ("redis://127.0.0.1:6379", "redis://nowhere.invalid:6379", "unix:///run/redis.sock"):
        host = ServiceSettings(host="0.0.0.0", redis_url=redis).advertised(5).removesuffix(":5").strip("[]")
        assert ip_address(host), "peers cannot resolve our host name"
        assert host not in ("0.0.0.0", "::")
    assert ServiceSettings(host="0.0.0.0", redis_url="redis://127.0.0.1").advertised(5) == "127.0.0.1:5"


def test_installations_and_tenants_share_no_keys_and_sessions_are_not_stored_in_clear() -> None:
    keys = RedisKeys("blue")
    assert keys.leases == "rz:blue:leases"
    assert len({keys.session(t, s) for t, s in (("", "a"), ("t", "a"), ("t", "b"))}) == 3
    assert "secret name" not in keys.session("t", "secret name")
    assert RedisKeys("green").session("t", "a") != keys.session("t", "a")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_link_is_reported_in_one_line(service: str) -> None:
    variable = {"kv_coordinator": "COORDINATOR_PORT"}.get(service)
    variable = f"RYZANSTEIN_{variable or f'{service.upper()}_PORT'}"
    environment = {
        **os.environ,
        "RYZANSTEIN_MODEL": "x",
        variable: "tcp://10.96.7.1:80",
        "RYZANSTEIN_REDIS_URL": "host:6379",
    }
    ended = captured([sys.executable, "-m", f"services.{service}"], env=environment)
    assert (ended.returncode, ended.stderr) == (1, "")
    line = json.loads(ended.stdout)  # a single one
    assert line["level"] == "error"
    for words in (variable, "tcp://10.96.7.1:80", "enableServiceLinks: false", "RYZANSTEIN_REDIS_URL", "redis://"):
        assert words in line["message"]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("LOG_LEVEL", "loud", "'loud': it should be 'debug', 'info', 'warning' or 'error'"),
        ("METRICS_PORT", "70000", "'70000': it should be less than or equal to 65535"),
        ("QUEUE_TIMEOUT_S", "soon", "'soon': it should be a valid number"),
        ("COORDINATOR_ADDRESS", "http://coordinator:50053", "must be host:port"),
        ("REDIS_URL", "127.0.0.1:6379", "must start with redis://, rediss:// or unix://"),
        ("REDIS_URL", "redis://:secret@ss/secret:rd@redis:6379/0", "percent-encoded"),
        ("REDIS_URL", "redis://:secret#secret@redis:6379/0", "percent-encoded"),
        ("REDIS_URL", "redis://:secret/secret@redis:6379/0", "percent-encoded"),
        ("REDIS_URL", "redis://user:secret@redis:port/0", "host[:port]"),
        ("REDIS_URL", "redis://:secret@redis/?socket_timeout=secret", "must be redis://"),
        ("REDIS_PASSWORD_FILE", "/nowhere/secret-file", "cannot be read: No such file"),
        ("REDIS_CA_FILE", "/nowhere/ca.crt", "cannot be read: No such file"),
        ("REDIS_CA_FILE", __file__, "must hold certificates in PEM format"),
    ],
)
def test_a_settings_error_names_the_value_and_the_allowed_range_without_secrets(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"RYZANSTEIN_{variable}", value)
    with pytest.raises(StartupError) as caught:
        read_settings(RouterSettings)
    message = str(caught.value)
    assert f"RYZANSTEIN_{variable}" in message
    assert words in message
    assert "secret" not in message.replace("/nowhere/secret-file", "")
    assert caught.value.__suppress_context__


def test_a_setting_without_a_default_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RYZANSTEIN_MODEL", raising=False)
    with pytest.raises(StartupError, match=r"RYZANSTEIN_MODEL is not set: \S+"):
        read_settings(WorkerSettings)


@pytest.mark.parametrize("name", ["a\nb", "a\u202eb", "a "])
def test_served_name_with_hidden_characters_is_rejected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("RYZANSTEIN_MODEL", "m")
    monkeypatch.setenv("RYZANSTEIN_SERVED_MODEL_NAME", name)
    with pytest.raises(StartupError, match=r"RYZANSTEIN_SERVED_MODEL_NAME.* expected 1 to 256 printable characters"):
        read_settings(WorkerSettings)


def test_contradictory_settings_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("b")
    for variable, value in (("PASSWORD", "a"), ("PASSWORD_FILE", str(tmp_path / "password"))):
        monkeypatch.setenv(f"RYZANSTEIN_REDIS_{variable}", value)
    with pytest.raises(StartupError, match="RYZANSTEIN_REDIS_PASSWORD and RYZANSTEIN_REDIS_PASSWORD_FILE"):
        read_settings(RouterSettings)
    monkeypatch.delenv("RYZANSTEIN_REDIS_PASSWORD")
    (tmp_path / "ca.crt").write_bytes(Authority.new(timedelta(days=1)).own.certificate)
    monkeypatch.setenv("RYZANSTEIN_REDIS_CA_FILE", str(tmp_path / "ca.crt"))
    with pytest.raises(StartupError, match="RYZANSTEIN_REDIS_URL does not start with rediss://"):
        read_settings(RouterSettings)
    monkeypatch.delenv("RYZANSTEIN_REDIS_CA_FILE")
    for variable in ("EXPECTED_MODELS", "EXPECTED_MODELS_CONFIG_MAP"):
        monkeypatch.setenv(f"RYZANSTEIN_{variable}", "a")
    with pytest.raises(StartupError, match="RYZANSTEIN_EXPECTED_MODELS and RYZANSTEIN_EXPECTED_MODELS_CONFIG_MAP"):
        read_settings(RouterSettings)
