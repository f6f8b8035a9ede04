"""`convert` writes what llama.cpp and transformers read, and loses nothing between types that hold the same numbers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from typer.testing import CliRunner

from services.cli.main import app
from services.compute.model.formats.gguf.container import read_container
from services.compute.model.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from services.compute.model.spec import ModelError
from services.tools.converter.run import AUTO, ConversionOptions, convert
from tests.unit.compute.model.formats.gguf.hard_texts import TEXTS
from tests.unit.compute.model.formats.gguf.llama_cpp import LlamaCpp
from tests.unit.compute.model.zoo import make, rope, write_checkpoint

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_ROWS = 600  # rows of the embedding, which is larger than the vocabulary
SHAPE: dict[str, Any] = {"vocab_size": N_ROWS, "hidden_size": 64, "intermediate_size": 96}
SHAPE |= {"bos_token_id": 0, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA3 = {**SHAPE, "num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0 + index / 4 for index in range(8)]}
MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": make("LlamaConfig", **SHAPE, **rope(**LLAMA3, original_max_position_embeddings=32)),
    "qwen2": make("Qwen2Config", **SHAPE, tie_word_embeddings=True),
    "gemma3": make("Gemma3TextConfig", **GEMMA3),
    "phi3": make("Phi3Config", **SHAPE),
    "phi3_longrope": make(
        "Phi3Config", **SHAPE, original_max_position_embeddings=32, **rope(rope_type="longrope", **LONG)
    ),
    "llama_linear": make("LlamaConfig", **SHAPE, **rope(rope_type="linear", factor=2.0)),
    "gpt2": make("GPT2Config", vocab_size=N_ROWS, n_embd=64),
    "qwen3_moe": make("Qwen3MoeConfig", **SHAPE, **EXPERTS, head_dim=16),
    "smollm3": make("SmolLM3Config", **SHAPE, num_hidden_layers=4),
    "gpt_neox": make("GPTNeoXConfig", **SHAPE),
}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Model folders in bfloat16, each made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_folder(tmp_path_factory.mktemp("model"), MODELS[name]())  # llama.cpp reads names
        return made[name]

    return make


def write_folder(folder: Path, config: transformers.PretrainedConfig) -> Path:
    write_checkpoint(config, folder).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS["qwen2"].patterns[0]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=500, min_frequency=1, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": [2, 0], "temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _umask() -> int:
    """The process's, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def run(source: Path, out: Path, kind: str = AUTO, *, shard_bytes: int = 10**9, force: bool = False) -> Path:
    convert(ConversionOptions(source, out, kind, shard_bytes, force), lambda done, of: None)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The logits of transformers for a folder."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return dict(model.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_keeps_every_tensor(name: str, folder: Make, tmp_path: Path) -> None:
    source = folder(name)
    file = run(source, tmp_path / "m.gguf")
    back = run(file, tmp_path / "back", shard_bytes=80_000)
    wanted, actual = weights(source), weights(back)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[key], wanted[key]) and actual[key].dtype == wanted[key].dtype for key in wanted)
    sizes = [shard.stat().st_size for shard in back.glob("*.safetensors")]
    assert {written.stat().st_mode & 0o777 for written in (file, *back.iterdir())} == {0o666 & ~_umask()}
    assert len(sizes) > 1
    assert max(sizes) < 83_000  # with the header


def test_tokenizer_template_and_generation_settings_survive(folder: Make, tmp_path: Path) -> None:
    source = folder("qwen2")
    back = run(run(source, tmp_path / "m.gguf"), tmp_path / "back")
    one, other = (Tokenizer.from_file(str(place / "tokenizer.json")) for place in (source, back))
    for text in (*TEXTS, "<|im_start|>a<tool>b<|im_end|>"):
        assert one.encode(text).ids == other.encode(text).ids, text
    assert other.get_added_tokens_decoder()[one.token_to_id("<tool>")].special is False
    loaded = transformers.AutoTokenizer.from_pretrained(back)
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == (SPECIAL[0], SPECIAL[2], SPECIAL[0])
    assert loaded.apply_chat_template([{"content": "Hi"}], tokenize=False) == "<|im_start|>Hi<|im_end|>"
    generation = json.loads((back / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert {key: generation[key] for key in ("temperature", "top_k", "repetition_penalty")} == {
        "temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "phi3"])
def test_llama_cpp_answers_like_transformers(name: str, folder: Make, tmp_path: Path) -> None:
    source = folder(name)
    file = run(source, tmp_path / "m.gguf", "F32")
    prompt = Tokenizer.from_file(str(source / "tokenizer.json")).encode("Hello, world! 123").ids
    actual = LlamaCpp(file).greedy(prompt, 12)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    wanted, ids = [], torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(12):
            logits = model(ids).logits[0, -1]
            logits[[0, 2]] = -torch.inf  # end tokens
            wanted.append(int(logits.argmax()))
            ids = torch.cat((ids, torch.tensor([[wanted[-1]]])), dim=1)
    assert actual == wanted


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_matrices_have_the_asked_type(kind: str, folder: Make, tmp_path: Path) -> None:
    source = folder("qwen2")
    file = run(source, tmp_path / "m.gguf", kind)
    stored, written = load_file(source / "model.safetensors"), {t.name: t for t in gguf.GGUFReader(file).tensors}
    names = {"blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight"}
    names |= {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.bias": "model.layers.0.self_attn.v_proj.bias",
    }
    names |= {"output_norm.weight": "model.norm.weight"}
    for name, hub in names.items():
        wanted = "F32" if "norm" in name or "bias" in name else kind
        wanted = "Q8_0" if name.startswith("token_embd") and kind.startswith("Q4") else wanted
        assert written[name].tensor_type.name == wanted
        values = gguf.quantize(stored[hub].float().numpy(), gguf.GGMLQuantizationType[wanted])
        assert np.array_equal(written[name].data, values)
    assert read_container(file).metadata.integer("general.file_type") == gguf.LlamaFileType[f"MOSTLY_{kind}"]


def test_rejections_keep_existing_files(folder: Make, tmp_path: Path) -> None:
    source, out = folder("qwen2"), tmp_path / "m.gguf"
    out.write_text("mine")
    body = tmp_path / "body"
    body.mkdir()
    (body / "config.json").write_text(transformers.BertConfig(architectures=["BertModel"]).to_json_string())
    odd = Path(shutil.copytree(source, tmp_path / "odd"))
    (odd / "generation_config.json").write_text('{"eos_token_id": [{}]}')
    for change, reason in (
        ({"source": odd, "force": True}, "eos_token_id: expected a token's id or a list of them, found [{}]"),
        ({"source": body, "force": True}, "the body of a model, without its head, is not converted"),
        ({"out": out / "m.gguf"}, "m.gguf: File exists"),
        ({}, "m.gguf: exists already; --force replaces it"),
        ({"kind": "Q6_K"}, "--type Q6_K: expected auto or one of F32, F16, Q4_0, Q4_1, Q8_0, BF16 for "),
        ({"out": tmp_path / "folder"}, "becomes a name that ends with .gguf"),
    ):
        with pytest.raises(ModelError) as refused:
            run(**{"source": source, "out": out, **change})
        assert reason in str(refused.value)
    assert out.read_text() == "mine"
    run(source, out, force=True)
    with pytest.raises(ModelError, match=r"--type Q8_0: expected auto or one of F32, F16, BF16 for "):
        run(out, tmp_path / "folder", "Q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["body", "m.gguf", "odd"]


def test_models_that_gguf_cannot_hold_are_refused(tmp_path: Path) -> None:
    yarn = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    gguf_would_read_another = "GGUF cannot hold this model: it would be read with another attention_scale"
    for number, (config, reason) in enumerate(
        (
            (make("LlamaConfig", **SHAPE, **yarn), "a rope of kind 'yarn' is not written"),
            (make("MistralConfig", **SHAPE, sliding_window=None), "MistralForCausalLM has no GGUF form here; known"),
            (make("Gemma3TextConfig", **{**GEMMA3, "query_pre_attn_scalar": 24}), gguf_would_read_another),
            (make("MambaConfig", vocab_size=N_ROWS), "layers with a state are not converted; served as it is"),
        )
    ):
        source = tmp_path / str(number)
        source.mkdir()
        with pytest.raises(ModelError) as refused:
            run(write_folder(source, config()), tmp_path / "m.gguf")
        assert reason in str(refused.value)
        assert not (tmp_path / "m.gguf").exists()


def test_the_command_converts_and_names_its_output(folder: Make, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    shown = CliRunner().invoke(app, ["convert", str(folder("qwen2")), str(out), "--type", "q8_0"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.strip() == str(out)
    assert read_container(out).metadata.integer("general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0
    shown = CliRunner().invoke(app, ["convert", str(folder("qwen2")), str(out)])
    assert (shown.exit_code, "exists already; --force replaces it" in shown.output) == (1, True)
