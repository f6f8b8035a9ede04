"""A folder of models that others write to at the same time, and a hub that contradicts itself."""

from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from services.cli.errors import CommandError
from services.cli.fetch.download import DamagedFileError, download
from services.cli.fetch.fetching import fetch_patiently
from services.cli.fetch.repository import ModelReference
from services.cli.fetch.store import ModelStore
from services.common.hub import Listing, RemoteFile
from services.compute.model.spec import ModelError
from services.worker.process.downloader import download as download_model
from tests.integration.cli.hub import COMMIT, Hub, running

FILES = {"config.json": b"{}", "model.safetensors": b"numbers"}
MODEL = ModelReference.parse("org/tiny")
FOLDER = f"org--tiny@{COMMIT[:12]}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub(dict(FILES))) as hub:
        yield hub


class Fetching:
    """`ryzanstein fetch`, in this process."""

    def __init__(self, hub: Hub, to: Path) -> None:
        self.hub, self.to = hub, to
        self.said: list[str] = []

    def __call__(self, reference: ModelReference = MODEL) -> Path:
        store = ModelStore(self.to, self.said.append)
        with store.locked(reference) as alone:
            fetch_patiently(
                reference, store, reference.name, endpoint=self.hub.url, retries=0, alone=alone, say=self.said.append
            )
        return self.to / reference.name

    @property
    def there(self) -> set[str]:
        return {path.name for path in self.to.iterdir() if not path.name.startswith(".lock-")}


@pytest.fixture
def fetching(hub: Hub, tmp_path: Path) -> Fetching:
    return Fetching(hub, tmp_path / "models")


def test_two_names_of_a_commit_share_its_folder(fetching: Fetching) -> None:
    fetching.hub.revisions = ("main", "v1")
    first, second = fetching(), fetching(ModelReference.parse("org/tiny", "v1"))
    assert first.readlink() == second.readlink() == Path(FOLDER)
    assert json.loads((first / ".complete").read_text())["revisions"] == ["main", "v1"]
    assert fetching.hub.sent["model.safetensors"] == 1


def test_leftovers_of_another_commit_are_removed(fetching: Fetching) -> None:
    left = fetching.to / f".tmp-org--tiny@{'b' * 12}-1"
    left.mkdir(parents=True)
    fetching()
    assert fetching.there == {"org--tiny", FOLDER}


def test_foreign_files_stay_untouched_when_locks_are_unsupported(
    fetching: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _operation: int) -> None:
        raise OSError(code, "no locks")

    left = fetching.to / f".tmp-{FOLDER}-1"
    left.mkdir(parents=True)
    locks = SimpleNamespace(flock=refuse, LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB)
    monkeypatch.setattr("services.cli.fetch.store.fcntl", locks)  # the hub's library has locks of its own
    code = errno.ENOLCK
    fetching()
    assert fetching.there == {"org--tiny", FOLDER, left.name}
    assert fetching.said[0].endswith("has no locks: processes that fetch at the same time each fetch all of it")
    code = errno.EIO
    with pytest.raises(OSError, match="no locks"):
        fetching()


@pytest.mark.parametrize("complete", [True, False])
def test_finished_download_of_a_faster_process_is_used(fetching: Fetching, complete: bool) -> None:
    store = ModelStore(fetching.to, fetching.said.append)
    first, second = (store.staging(MODEL, COMMIT, adopt=False) for _ in range(2))
    final = store.publish(first, MODEL, COMMIT, 7)
    (second / "config.json").touch()
    if complete:
        assert store.publish(second, MODEL, COMMIT, 7) == final
        assert fetching.there == {FOLDER}
    else:
        (final / ".complete").rename(final / "foreign")
        with pytest.raises(CommandError, match="is in the way: it is not complete, and not ours to remove"):
            store.publish(second, MODEL, COMMIT, 7)
        assert (final / "foreign").exists()


@pytest.fixture
def worker(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[Path]]:
    """A worker's download of the model."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return lambda: download_model("org/tiny", "", lambda _: None)


@pytest.mark.parametrize(
    ("names", "served"),
    [
        (("config.json", "[a]model.safetensors", "onnx/config.json"), {"config.json", "[a]model.safetensors"}),
        (("model.safetensors", "m.gguf"), {"m.gguf"}),
        (("model.safetensors",), "org/tiny@main: no config.json with safetensors and no GGUF file to serve"),
    ],
)
async def test_a_worker_downloads_the_files_that_are_fetched(
    names: tuple[str, ...], served: set[str] | str, fetching: Fetching, worker: Callable[[], Awaitable[Path]]
) -> None:
    fetching.hub.files = dict.fromkeys(names, b"{}")
    if isinstance(served, str):
        with pytest.raises(CommandError, match=served):
            fetching()
        with pytest.raises(ModelError, match=served):
            await worker()
        assert not fetching.hub.sent
    else:
        fetched = {path.name for path in fetching().iterdir()} - {".complete"}
        place = await worker()
        folder = place if place.is_dir() else place.parent
        assert fetched == {path.name for path in folder.iterdir()} == served


async def test_a_gated_model_says_where_to_ask(fetching: Fetching, worker: Callable[[], Awaitable[Path]]) -> None:
    fetching.hub.gated = True
    with pytest.raises(CommandError, match="org/tiny: access must be asked for on its page"):
        fetching()
    with pytest.raises(ModelError, match="org/tiny: access must be asked for on its page"):
        await worker()


def test_file_that_differs_from_its_listing_is_removed(hub: Hub, tmp_path: Path) -> None:
    api, name = HfApi(endpoint=hub.url), "model.safetensors"
    for file, message in (
        (RemoteFile(name, 8, "", ""), f"{name} has 7 bytes, the hub says 8"),
        (RemoteFile("other.safetensors", 1, "", ""), "other.safetensors did not come"),
    ):
        with pytest.raises(DamagedFileError, match=message):
            download(api, "org/tiny", Listing(COMMIT, (file,)), tmp_path)
        assert not (tmp_path / file.name).exists()
    with pytest.raises(CommandError, match=r"1000000000\.0 GB are needed and .* GB are free"):
        download(api, "org/tiny", Listing(COMMIT, (RemoteFile(name, 10**18, "", ""),)), tmp_path)
