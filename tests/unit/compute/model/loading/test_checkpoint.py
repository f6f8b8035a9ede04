"""Slices of checkpoints: the right bytes, or an error that names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.compute.model.families.naming import UNUSED, TensorRef
from services.compute.model.formats.safetensors import TensorFiles
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelError

A = torch.arange(48.0).view(12, 4)


def _one_file(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _read(folder: Path, ref: TensorRef, rows: Span | None = None, cols: Span | None = None) -> torch.Tensor:
    shape = (4, 4) if ref.n_stored or ref.n_parts > 1 else (12, 4)
    with _opened(folder, {"x": ref}) as source:
        return _matrix(source, "x", shape, rows, cols)


@contextmanager
def _opened(folder: Path, refs: dict[str, TensorRef], *settings: Any, **more: Any) -> Iterator[Checkpoint]:
    with closing(TensorFiles(folder)) as files:
        yield Checkpoint(files, refs, *settings, **more)


def _matrix(
    source: Checkpoint, key: str, shape: tuple[int, int] = (12, 4), rows: Span | None = None, cols: Span | None = None
) -> torch.Tensor:
    whole = Shard.whole(key, shape)
    weight = source.weight(replace(whole, rows=rows or whole.rows, cols=cols or whole.cols))
    return weight.rows(0, weight.shape[0])


def test_rows_and_columns(tmp_path: Path) -> None:
    folder = _one_file(tmp_path, a=A)
    assert torch.equal(_read(folder, TensorRef("a")), A)
    assert torch.equal(_read(folder, TensorRef("a"), Span(2, 7), Span(1, 3)), A[2:7, 1:3])


def test_the_index_decides_which_of_several_files_holds_a_tensor(tmp_path: Path) -> None:
    save_file({"a": A, "c": A + 2}, tmp_path / "1.safetensors")
    save_file({"a": A + 1, "b": A + 2}, tmp_path / "2.safetensors")
    places = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}
    refs = {"x": TensorRef("a"), "y": TensorRef("b"), "z": TensorRef("c")}

    def read(**changes: str) -> torch.Tensor:
        index = {"weight_map": {name: file for name, file in (places | changes).items() if file}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with _opened(tmp_path, refs) as source:
            return _matrix(source, "x")

    assert torch.equal(read(), A)
    assert torch.equal(read(a="2.safetensors"), A + 1)
    with pytest.raises(ModelError, match=r"weight_map: a is in 1\.safetensors and 2\.safetensors; it has to say"):
        read(a="")
    with pytest.raises(ModelError, match=r"index\.json: weight_map: no file holds d \(1 tensors in all\)"):
        read(d="1.safetensors")


def test_an_index_that_does_not_list_the_whole_file_is_passed_over(tmp_path: Path) -> None:
    """As transformers does: it is of an earlier save into the same folder."""
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"a": A + 1}, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for listed in ("1.safetensors", "2.safetensors", "model.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": listed}}))
        with closing(TensorFiles(tmp_path)) as files:
            assert torch.equal(files.whole("a"), A)


def test_an_index_may_list_unread_tensors_and_omit_unneeded_tensors(tmp_path: Path) -> None:
    save_file({"a": A, "b": A + 1, "extra": A + 2}, tmp_path / "1.safetensors")
    index = {"a": "1.safetensors", "mtp.0.fc.weight": "1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    refs = {"x": TensorRef("a"), "y": TensorRef("b")}
    with closing(TensorFiles(tmp_path, ignored=UNUSED)) as files:
        source = Checkpoint(files, refs)
        assert torch.equal(_matrix(source, "y"), A + 1)
        with pytest.raises(ModelError, match="a: not used by this architecture"):
            Checkpoint(files, {"y": TensorRef("b")})
    with pytest.raises(ModelError, match=r"no file holds mtp\.0\.fc\.weight"):
        TensorFiles(tmp_path)
    index |= {"mtp.0.fc.weight": "2.safetensors"}  # a file that is not there, because nothing reads it
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with closing(TensorFiles(tmp_path, ignored=UNUSED)) as files:
        assert "a" in files.names
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index | {"b": "2.safetensors"}}))
    with pytest.raises(ModelError, match=r"2\.safetensors"):
        TensorFiles(tmp_path, ignored=UNUSED)


def test_weights_are_not_checked_without_a_dtype(tmp_path: Path) -> None:
    folder = _one_file(tmp_path, a=torch.full((12, 4), float("inf")))
    with _opened(folder, {"x": TensorRef("a")}, dtype=None) as source:
        assert _matrix(source, "x").isinf().all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(wrong: float, tmp_path: Path) -> None:
    a = A.clone()
    a[5, 2] = wrong
    folder = _one_file(tmp_path, a=a, b=a[:, 2])
    refs = {"x": TensorRef("a"), "y": TensorRef("b")}
    with _opened(folder, refs) as source:
        for read in (lambda: _matrix(source, "x"), lambda: source.vector("y", 12)):
            with pytest.raises(ModelError, match=rf"model\.safetensors: [ab]: holds {wrong}, which is not finite"):
                read()
        assert torch.equal(_matrix(source, "x", rows=Span(0, 5)), A[:5])  # rows for another rank


def test_weights_that_the_served_dtype_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    folder = _one_file(tmp_path, a=A * 2048)
    with _opened(folder, {"x": TensorRef("a")}, dtype=torch.bfloat16) as source:
        _matrix(source, "x")
    with (
        _opened(folder, {"x": TensorRef("a")}, dtype=torch.float16) as source,
        pytest.raises(ModelError, match=r"a: holds 96256\.0, which is not finite in torch\.float16"),
    ):
        _matrix(source, "x")


def test_errors_name_file_and_key(tmp_path: Path) -> None:
    folder = _one_file(tmp_path, a=A, extra=A + 1)
    with pytest.raises(ModelError, match=r"b: missing"):
        Checkpoint(TensorFiles(folder), {"x": TensorRef("a"), "y": TensorRef("b")})
    with pytest.raises(ModelError, match=r"a\.b: missing \(1 tensors in all\); it is there with the prefix 'lm\.'"):
        Checkpoint(TensorFiles(_one_file(tmp_path, **{"lm.a.b": A})), {"x": TensorRef("a.b")})
    folder = _one_file(tmp_path, a=A, extra=A + 1)
    with pytest.raises(ModelError, match=r"model\.safetensors: extra: not used"):
        Checkpoint(TensorFiles(folder), {"x": TensorRef("a")})
    with (
        _opened(folder, {"x": TensorRef("a")}, ("ext*",)) as source,
        pytest.raises(ModelError, match=r"model\.safetensors: a: expected shape \[6, 4\], found \[12, 4\]"),
    ):
        _matrix(source, "x", (6, 4))


def test_pickles_are_refused_with_the_reason(tmp_path: Path) -> None:
    torch.save({"a": A}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: pickle files are refused.*runs the code"):
        Checkpoint(TensorFiles(tmp_path), {})


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        Checkpoint(TensorFiles(tmp_path), {})
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(TensorFiles(tmp_path), {})
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    for broken, message in (
        *(("{", "not JSON"), ("[]", "not a JSON object"), ("{}", "weight_map"), ('{"weight_map": []}', "weight_map")),
        *(
            ('{"weight_map": {"a": 1}}', "weight_map"),
            ('{"weight_map": {"a": "../x.safetensors"}}', "not a file of this"),
            ('{"weight_map": {"a": "x\\u0000"}}', "not a file of this"),
            ('{"weight_map": {"a": "\\ud800"}}', "not a file of this"),
            (json.dumps({"weight_map": {"mtp.a": "x" * 300}}), "not a file of this"),
        ),
        ('{"weight_map": {"a": "absent.safetensors"}}', r"absent\.safetensors: No such file"),
    ):
        index.write_text(broken)
        with pytest.raises(ModelError, match=message):
            Checkpoint(TensorFiles(tmp_path), {})
    save_file({"a": A}, tmp_path / "one.safetensors")
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}')
    with pytest.raises(ModelError, match="no file holds b"):
        Checkpoint(TensorFiles(tmp_path), {"x": TensorRef("a"), "y": TensorRef("b")})
