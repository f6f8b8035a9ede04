from __future__ import annotations

from pathlib import Path

from trainer.chat import chat_documents
from trainer.corpus import Group, is_held_out, library_root, read_library, read_source_files, split


def test_reads_each_text_once_and_only_the_standard_library(library: Path) -> None:
    paths = [document.path for document in read_source_files(library)]
    assert len(paths) == 201
    assert paths == sorted(paths)
    assert not any("other" in path or "latin" in path or "topics" in path for path in paths)
    # Of two equal files the first in path order stays.
    assert "copy.py" in paths
    assert "mod0.py" not in paths


def test_groups_follow_the_folder(library: Path) -> None:
    groups = {document.path: document.group for document in read_library(library)}
    assert groups["test/test_a.py"] is Group.TESTS
    assert groups["mod1.py"] is Group.LIBRARY
    assert groups["mod1.py#docstrings"] is Group.DOCUMENTATION
    assert groups["pydoc_data/topics.py#with"] is Group.DOCUMENTATION


def test_nothing_held_out_reaches_training(library: Path) -> None:
    sides = split(read_library(library), seed=1, percent=20)
    files = {document.path.partition("#")[0] for document in sides.held_out}
    assert 20 < len(files) < 60
    assert not files & {document.path.partition("#")[0] for document in sides.train}
    chat = chat_documents(sides.train)
    held_numbers = {path.removeprefix("mod").removesuffix(".py") for path in files if path.startswith("mod")}
    text = "".join(document.text for document in chat)
    assert not any(f"mod{number}." in text or f"kind {number}." in text for number in held_numbers)


def test_split_of_the_real_library_is_disjoint_by_path_and_by_text() -> None:
    sides = split(list(read_source_files(library_root())), seed=2_026)
    assert not {d.path for d in sides.train} & {d.path for d in sides.held_out}
    assert not {hash(d.text) for d in sides.train} & {hash(d.text) for d in sides.held_out}
    share = len(sides.held_out) / (len(sides.held_out) + len(sides.train))
    assert 0.02 < share < 0.07


def test_side_depends_on_seed_and_path_alone() -> None:
    paths = [f"a/{n}.py" for n in range(2_000)]
    sides = [is_held_out(path, 1, 4.0) for path in paths]
    assert sides == [is_held_out(path, 1, 4.0) for path in paths]
    assert sides != [is_held_out(path, 2, 4.0) for path in paths]
    assert 40 < sum(sides) < 130


def test_chat_samples_end_their_answer_and_never_change(library: Path) -> None:
    train = split(read_library(library), seed=1).train
    samples = chat_documents(train)
    assert samples == chat_documents(train)
    assert any("def double(x):" in sample.text for sample in samples)
    assert any("The with statement." in sample.text for sample in samples)
    for sample in samples:
        assert sample.group is Group.CHAT
        assert sample.text.count("<|assistant|>") == 1
        assert sample.text.endswith("<|end|>\n")
