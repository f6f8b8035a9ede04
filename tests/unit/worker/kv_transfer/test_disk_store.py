"""Blocks in files: a restarted process finds them, and no damaged or foreign file is served."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import chain_root, extend_chain, wire_hash
from services.worker.engine.kv_events import BlockPlace, KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer.block_file import TEMPORARY, layout_identity, read_name, write_block
from services.worker.kv_transfer.disk_store import DiskStore
from services.worker.scheduling.places import BlockName

SIZE = 64
LAYOUT = pb.KvLayout(hash_root="model", device="cpu", tensor_parallel=1, block_tokens=16, block_bytes=SIZE)
OTHER_LAYOUT = pb.KvLayout(hash_root="another", device="cpu", tensor_parallel=1, block_tokens=16, block_bytes=SIZE)


def chain(n: int, root: bytes = chain_root("model"), first: int = 0) -> list[BlockName]:
    """The names of a prompt's blocks."""
    digests = extend_chain(root, [first + i % 90 for i in range(16 * n)])
    return [
        BlockName(digest, parent, (wire_hash(digest),))
        for parent, digest in zip([b"", *digests], digests, strict=False)
    ]


def content(name: BlockName) -> bytes:
    return name.digest * (SIZE // len(name.digest))


@contextmanager
def a_store(folder: Path, n_blocks: int = 100, layout: pb.KvLayout = LAYOUT) -> Iterator[DiskStore]:
    store = DiskStore(folder, layout, SIZE, n_blocks * SIZE, 1e9, KvEventLog(), PlaceTotals())
    try:
        yield store
    finally:
        store.close()


async def put(store: DiskStore, names: Sequence[BlockName]) -> None:
    for name in names:
        assert store.prepare_store(name)
        await store.write([name], [content(name)])
        store.complete_store(name, stored=True)


async def get(store: DiskStore, names: Sequence[BlockName]) -> list[bytes | None]:
    digests = [name.digest for name in names]
    held = store.prepare_load(digests[: store.lookup(digests)])
    try:
        return await store.read([entry.name.digest for entry in held])
    finally:
        store.complete_load(held)


def path_of(store: DiskStore, name: BlockName) -> Path:
    text = name.digest.hex()
    return store.folder / text[:2] / text


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/??/*"))


async def files_become(folder: Path, n: int) -> None:
    """Deletions follow in the background."""
    async with asyncio.timeout(60):
        while len(files(folder)) != n:  # noqa: ASYNC110 - another thread deletes
            await asyncio.sleep(0.01)


def write_and_die(folder: Path) -> None:
    """A process that writes blocks is killed after some of them."""
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from tests.unit.worker.kv_transfer.test_disk_store import *\n"
        "async def main():\n"
        "    with a_store(Path(sys.argv[1]), 10**6) as store:\n"
        "        await put(store, chain(20_000))\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)])
    while len(files(folder)) < 20:
        time.sleep(0.01)
        assert process.poll() is None
    process.kill()
    process.wait()


async def test_reopened_store_holds_the_blocks_that_were_written(tmp_path: Path) -> None:
    names = chain(5)
    with a_store(tmp_path) as store:
        await put(store, names)
        hashes = store.hashes()
    with a_store(tmp_path) as store:
        assert store.lookup([name.digest for name in names]) == 0, "the folder is read in the background"
        await store.open()
        assert await get(store, names) == [content(name) for name in names]
        assert store.hashes() == hashes
        assert not store.totals.failures.total()
    assert all(path.parent.stat().st_mode & 0o077 == 0 for path in files(tmp_path)), "for this user only"


def flip(at: int) -> Callable[[DiskStore, BlockName], None]:
    def damage(store: DiskStore, name: BlockName) -> None:
        data = bytearray(path_of(store, name).read_bytes())
        data[at] ^= 1
        path_of(store, name).write_bytes(data)

    return damage


def cut(n: int) -> Callable[[DiskStore, BlockName], None]:
    def damage(store: DiskStore, name: BlockName) -> None:
        path_of(store, name).write_bytes(path_of(store, name).read_bytes()[:n])

    return damage


def lengthen(store: DiskStore, name: BlockName) -> None:
    path_of(store, name).write_bytes(path_of(store, name).read_bytes() + b"\0")


def swap_in_another_block(store: DiskStore, name: BlockName) -> None:
    other = chain(1, first=7)[0]
    write_block(path_of(store, name), layout_identity(LAYOUT), other, content(other))


def swap_in_another_model(store: DiskStore, name: BlockName) -> None:
    write_block(path_of(store, name), layout_identity(OTHER_LAYOUT), name, content(name))


def swap_in_another_size(store: DiskStore, name: BlockName) -> None:
    write_block(path_of(store, name), layout_identity(LAYOUT), name, content(name)[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        *(flip(0), flip(7), flip(20), flip(60), flip(100), flip(150), flip(-1)),
        *(cut(0), cut(100), cut(160), cut(-1), lengthen),
        *(swap_in_another_block, swap_in_another_model, swap_in_another_size),
    ],
)
@pytest.mark.parametrize("reopened", [False, True])
async def test_damaged_and_foreign_files_are_counted_deleted_and_never_served(
    tmp_path: Path, damage: Callable[[DiskStore, BlockName], None], reopened: bool
) -> None:
    names = chain(4)
    with a_store(tmp_path) as store:
        await put(store, names)
        damage(store, names[2])
        if not reopened:
            assert (await get(store, names))[:3] == [content(names[0]), content(names[1]), None]
            assert store.totals.failures["corrupt"] == 1
            assert len(store) == 2, "what follows a lost block is of no use"
    with a_store(tmp_path) as store:
        await store.open()
        contents = await get(store, names)
        # The header of a restart's file is read at once, its contents with the first load.
        assert contents[:2] == [content(name) for name in names[:2]]
        assert not any(contents[2:3])
        assert store.totals.failures["corrupt"] == reopened
        await files_become(tmp_path, 2)


async def test_killed_process_leaves_no_block_that_is_served(tmp_path: Path) -> None:
    """It is killed while it writes; later files are whole or absent."""
    await asyncio.to_thread(write_and_die, tmp_path)
    with a_store(tmp_path, 10**6) as store:
        half = path_of(store, chain(1, first=3)[0])
        half.parent.mkdir(exist_ok=True)
        half.with_name(half.name + TEMPORARY).write_bytes(b"RZKV")  # left by a kill in the middle of a write
        await store.open()
        names = chain(len(store))
        assert len(store) >= 19
        assert await get(store, names) == [content(name) for name in names]
        assert not store.totals.failures["corrupt"]
        assert not any(path.name.endswith(TEMPORARY) for path in files(tmp_path))


@contextmanager
def no_room(n_bytes: int = SIZE) -> Iterator[None]:
    """The kernel refuses to write more than some bytes to a file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_full_disk_leaves_no_part_of_a_file_and_serves_older_blocks(tmp_path: Path) -> None:
    names = chain(4)
    with a_store(tmp_path) as store:
        await put(store, names[:2])
        assert store.prepare_store(names[2])
        with no_room(), pytest.raises(OSError, match="File too large"):
            await store.write([names[2]], [content(names[2])])
        store.complete_store(names[2], stored=False)
        assert len(files(tmp_path)) == 2
        assert await get(store, names) == [content(name) for name in names[:2]]
        assert store.totals.bytes == 2 * SIZE
        await put(store, names[2:])
        assert await get(store, names) == [content(name) for name in names]


async def test_other_tenants_models_and_processes_find_no_block(tmp_path: Path) -> None:
    names = chain(3)
    with a_store(tmp_path) as store, a_store(tmp_path) as second, a_store(tmp_path, layout=OTHER_LAYOUT) as other:
        await put(store, names)
        for each in (second, other):
            await each.open()
            assert len(each) == 0
            assert each.folder != store.folder
        salted = chain(3, chain_root("model", "tenant b"))
        assert store.lookup([name.digest for name in salted]) == 0


async def test_smaller_store_keeps_whole_prefixes_of_the_last_used_blocks(tmp_path: Path) -> None:
    old, new = chain(4), chain(4, first=40)
    with a_store(tmp_path) as store:
        await put(store, old)
        await put(store, new)
        for name in old:
            os.utime(path_of(store, name), (1e9, 1e9))
    with a_store(tmp_path, 6) as store:
        await store.open()
        assert store.lookup([name.digest for name in new]) == 4
        assert store.lookup([name.digest for name in old]) == len(store) - 4 <= 2
        await files_become(tmp_path, len(store))


async def test_folder_that_was_not_used_for_a_week_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "mine" / "0").mkdir(parents=True)
    (tmp_path / "rz-kv-no-folder").mkdir()
    (tmp_path / "rz-kv-no-folder" / "0").touch()
    with a_store(tmp_path, layout=OTHER_LAYOUT) as forgotten, a_store(tmp_path, layout=OTHER_LAYOUT) as in_use:
        await put(forgotten, chain(1))
        await put(in_use, chain(1))
    week = time.time() - 8 * 86_400
    for path in (*forgotten.folder.rglob("*"), forgotten.folder, tmp_path / "mine" / "0"):
        os.utime(path, (week, week))
    with a_store(tmp_path) as store:
        await store.open()
    assert not forgotten.folder.exists()
    assert in_use.folder.exists()
    assert (tmp_path / "mine" / "0").exists(), "not a folder of ours"
    assert (tmp_path / "rz-kv-no-folder" / "0").exists(), "neither"


def test_store_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="63 bytes hold no KV block, which has 64"):
        DiskStore(tmp_path, LAYOUT, SIZE, SIZE - 1, 1.0, KvEventLog(), PlaceTotals())


async def test_files_name_their_blocks(tmp_path: Path) -> None:
    names = chain(2)
    with a_store(tmp_path) as store:
        await put(store, names)
        assert [read_name(path_of(store, name), layout_identity(LAYOUT)) for name in names] == names
        assert store.place is BlockPlace.DISK
