"""Where a model is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from services.compute.model.loading.hub import Download, resolve_model
from services.compute.model.spec import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _cached_repository(cache: Path) -> Path:
    """A cache as huggingface_hub lays it out after a download of the branch main."""
    repository = cache / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_local_folder_resolves_to_its_own_path(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("revision", ["", "main", COMMIT])
def test_a_cached_repository_needs_no_network(tmp_path: Path, revision: str) -> None:
    snapshot = _cached_repository(tmp_path)
    assert resolve_model("org/tiny", revision) == snapshot


def test_a_cached_repository_serves_while_the_hub_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot, begun = _cached_repository(tmp_path), list[Download]()
    assert resolve_model("org/tiny", "", begun.append) == snapshot
    assert not begun
    with pytest.raises(ModelError, match="org/other: not in the local cache, and the hub is not asked or not reached"):
        resolve_model("org/other")


def test_offline_and_not_cached_is_refused() -> None:
    with pytest.raises(ModelError, match="org/other: not in the local cache"):
        resolve_model("org/other")


def test_another_revision_never_resolves_to_the_cached_revision(tmp_path: Path) -> None:
    _cached_repository(tmp_path)
    with pytest.raises(ModelError, match="org/tiny"):
        resolve_model("org/tiny", "v2")


@pytest.mark.parametrize("model", ["/nowhere/model", "./model", "~/no-such-model", "a/b/c", "not a valid id"])
def test_an_invalid_model_name_is_rejected(model: str) -> None:
    with pytest.raises(ModelError, match=r"model|a/b/c|valid"):
        resolve_model(model)
