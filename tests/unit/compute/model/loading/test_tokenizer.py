"""A tokenizer is completed from the files next to it as transformers completes it, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from services.compute.model.loading.tokenizer import TokenizerFiles, read_tokenizer
from services.compute.model.spec import ModelError
from tests.unit.gateway.made_tokenizers import byte_level

TEXT = "<|im_begin|>user\nwhat is<tool> a list<|im_stop|> <|bos|>"
N = byte_level().get_vocab_size()


def _token(content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    return {
        "content": content, "special": special, "lstrip": False, "rstrip": False, "single_word": False,
        "normalized": not special, **flags,
    }  # fmt: skip


def _write(folder: Path, **files: Any) -> None:
    byte_level().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _read(folder: Path, vocab_size: int = N + 10) -> TokenizerFiles:
    file = folder / "tokenizer_config.json"
    return read_tokenizer(folder, json.loads(file.read_text()) if file.is_file() else {}, vocab_size)


BESIDE: dict[str, dict[str, Any]] = {
    "added_tokens_decoder": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                str(N): _token("<|im_begin|>"),
                str(N + 1): _token("<|im_stop|>", rstrip=True),
                str(N + 2): _token("<tool>", special=False),
            },
            "bos_token": "<|bos|>",
            "eos_token": "<|im_stop|>",
        }
    },
    "added_tokens": {
        "added_tokens": {"<|im_begin|>": N, "<tool>": N + 1, "<|im_stop|>": N + 2},
        "tokenizer_config": {"eos_token": "<|im_stop|>"},
        "special_tokens_map": {"bos_token": _token("<|bos|>"), "additional_special_tokens": ["<|im_begin|>"]},
    },
    "special_tokens_map": {"special_tokens_map": {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}},
    "both_maps": {
        "tokenizer_config": {"bos_token": "<|eos|>", "pad_token": None},
        "special_tokens_map": {"bos_token": "<|bos|>", "pad_token": "<|eos|>"},
    },
    "only_named": {"tokenizer_config": {"eos_token": "<|im_stop|>", "additional_special_tokens": ["<|im_begin|>"]}},
    "nothing": {},
}


@pytest.mark.parametrize("case", BESIDE)
def test_a_tokenizer_equals_that_of_transformers(case: str, tmp_path: Path) -> None:
    _write(tmp_path, **BESIDE[case])
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = _read(tmp_path)
    assert Tokenizer.from_buffer(ours.json).encode(TEXT).ids == expected(TEXT)["input_ids"]
    assert ours.special_tokens == expected.special_tokens_map
    assert ours.eos_token_id == expected.eos_token_id
    plain = Tokenizer.from_buffer(ours.json).decode(expected(TEXT)["input_ids"])
    assert plain == expected.decode(expected(TEXT)["input_ids"], skip_special_tokens=True)


def test_a_map_supplies_tokens_missing_in_a_newer_config(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"0": _token("<|bos|>")}, "eos_token": "<|eos|>"}
    _write(tmp_path, tokenizer_config=config, special_tokens_map={"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})
    assert _read(tmp_path).special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}


def test_tokens_without_an_embedding_stay_text(tmp_path: Path) -> None:
    """Their ids would be refused by the model."""
    _write(tmp_path, added_tokens={"<|im_begin|>": N}, tokenizer_config={"pad_token": "<|pad|>"})
    ids = Tokenizer.from_buffer(_read(tmp_path, N).json).encode("<|im_begin|><|pad|>").ids
    assert max(ids) < N


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {str(N + 3): _token("<x>")}}}, f"would be token {N} instead"),
        ({"added_tokens": {"<x>": N + 1}}, r"added_tokens\.json: '<x>' would be token"),
        ({"added_tokens": ["<x>"]}, r"added_tokens\.json: not a JSON object"),
    ],
)
def test_ids_that_cannot_be_kept_are_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    _write(tmp_path, **files)
    with pytest.raises(ModelError, match=message):
        _read(tmp_path)


def test_an_invalid_tokenizer_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        _read(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelError, match=r"missing.*vocab\.json alone"):
        _read(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    for text, message in ((pointer, "git-lfs pointer"), ("{}", "not a tokenizer"), ("", "not a tokenizer")):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelError, match=rf"tokenizer\.json: .*{message}"):
            _read(tmp_path)
