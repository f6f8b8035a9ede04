"""A GGUF file has all that gateways need; a folder of several needs a choice."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer

from services.common.lifecycle import StartupError
from services.compute.model.loading.hub import local_model
from services.compute.model.loading.vocabulary import read_vocabulary
from services.compute.model.spec import ModelError
from services.worker.native.startup import model_folder, model_revision, read_model
from tests.unit.compute.model import zoo
from tests.unit.compute.model.formats.gguf.models import random_model, write_model

TOKENS = [*(chr(33 + number) for number in range(93)), "ab", "<|eos|>", "<|eot|>", "<|pad|>", "<|bos|>", "z!"]
SEVERAL = ("m-Q4_0.gguf", "m-Q8_0.gguf")


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in TOKENS])
    writer.add_token_merges(["a b", "z !"])
    writer.add_eos_token_id(TOKENS.index("<|eos|>"))
    writer.add_bos_token_id(TOKENS.index("<|bos|>"))
    writer.add_add_bos_token(True)
    writer.add_eot_token_id(TOKENS.index("<|eot|>"))
    writer.add_chat_template("{{ messages }}")
    writer.add_float32("general.sampling.temp", 0.5)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny-Q8_0.gguf"
    return write_model(random_model(zoo.VARIANTS["llama"]()), "llama", file, describe=add_tokenizer)


def test_gateways_get_the_tokenizer_and_templates_of_the_file(file: Path) -> None:
    actual = read_model(file)
    eos, bos, eot = (TOKENS.index(f"<|{name}|>") for name in ("eos", "bos", "eot"))
    assert Tokenizer.from_buffer(actual.tokenizer.json).encode("abc").ids == [
        bos,
        TOKENS.index("ab"),
        TOKENS.index("c"),
    ]
    assert set(actual.eos_token_ids) == {eos, eot}
    assert (actual.tokenizer.special_tokens["eos_token"], actual.tokenizer.add_bos_token) == ("<|eos|>", True)
    assert (actual.architecture, actual.spec.family) == ("LlamaForCausalLM", "llama")
    assert (actual.chat_template, actual.sampling.temperature) == ("{{ messages }}", 0.5)
    assert read_vocabulary(file, 99, [eos]).vocab_size == 99


def test_a_generation_config_in_the_folder_overrides_the_file(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "top_k": 7}')
    sampling = read_model(copy).sampling
    assert (sampling.temperature, sampling.top_k) == (0, 7)
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(StartupError, match=r"generation_config.json: `temperature` must be from 0 to 100, not -1"):
        read_model(copy)


def test_equal_files_are_one_model_anywhere(file: Path, tmp_path: Path) -> None:
    copy = shutil.copy(file, tmp_path / file.name)
    identity = read_model(file).identity
    assert read_model(copy).identity == identity
    with copy.open("r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"1234")
    assert read_model(copy).identity != identity


def test_a_file_without_a_tokenizer_or_cut_off_is_refused_before_the_ranks_start(file: Path, tmp_path: Path) -> None:
    bare = write_model(random_model(zoo.VARIANTS["llama"]()), "llama", tmp_path / "bare.gguf")
    with pytest.raises(StartupError, match=r"RYZANSTEIN_MODEL .*bare.gguf: tokenizer.ggml"):
        read_model(bare)
    whole = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-100])
    with pytest.raises(StartupError, match=r"cut.gguf: .* needs bytes .* it is cut off"):
        read_model(tmp_path / "cut.gguf")


async def test_a_model_name_resolves_to_its_file_or_folder(file: Path, tmp_path: Path) -> None:
    assert await model_folder(str(file), "") == file
    assert await model_folder(str(file.parent), "") == file
    with pytest.raises(StartupError, match=r"RYZANSTEIN_MODEL .*: neither config.json nor a GGUF file in "):
        await model_folder(str(tmp_path), "")
    with pytest.raises(ValueError, match=r"tokenizer"):
        read_vocabulary(tmp_path, 99, [])
    (tmp_path / ".complete").write_text("of another program")
    assert model_revision("main", tmp_path) == "main"
    for name in SEVERAL:
        (tmp_path / name).touch()
    assert local_model(f"{tmp_path}:q8_0") == tmp_path / "m-Q8_0.gguf"
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert local_model(str(tmp_path)) == tmp_path  # the publisher's own format
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"RYZANSTEIN_MODEL .*: 2 GGUF models fit ''; choose .* m-Q4_0.gguf, m-Q8_0"):
        await model_folder(str(tmp_path), "")
    for wrong in (f"{file}:Q8_0", str(tmp_path / "config.json"), str(tmp_path / "none.gguf"), "none.gguf"):
        with pytest.raises(ModelError, match=r"a file; allowed|no such folder or GGUF file"):
            local_model(wrong)
