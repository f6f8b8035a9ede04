"""Files that git-lfs, a download or a hand left broken are refused by name, before any rank starts."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from services.cli.errors import CommandError
from services.cli.stack.options import StackOptions, check
from services.common.lifecycle import StartupError
from services.common.ports import free_port
from services.common.templates import compile_template
from services.compute.model.files import read_header
from services.compute.model.loading.sampling import SamplingDefaults
from services.compute.model.spec import ModelError
from services.worker.native.startup import model_folder, read_model
from tests.models import BUNDLED_MODEL

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_pointers_of_git_lfs(name: str, folder: Path) -> None:
    read_model(folder)
    (folder / name).write_bytes(POINTER)
    with pytest.raises(StartupError, match=rf"{name}: a git-lfs pointer"):
        read_model(folder)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A copy of the model where every user may read it; closed folders lead to pytest's own."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder = Path(shutil.copytree(BUNDLED_MODEL, Path(place) / "model"))
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        yield folder


@contextmanager
def kept_out(closed: Path) -> Iterator[str]:
    """Close it, and be a user whom modes keep out, as they do not keep out root; yields what an error says of it."""
    closed.chmod(0)
    uid = os.geteuid()
    os.seteuid(uid or 65534)
    try:
        yield rf"belongs to {pwd.getpwuid(uid).pw_name} \(uid {uid}\) with mode 0000, read as .*\(?uid {os.geteuid()}"
    finally:
        os.seteuid(uid)
        closed.chmod(0o755)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
async def test_a_file_that_may_not_be_read_names_its_owner_and_the_reader(name: str, open_folder: Path) -> None:
    with (
        kept_out(open_folder / name) as reader,
        pytest.raises(StartupError, match=rf"RYZANSTEIN_MODEL .*{name}: Permission denied: it {reader}"),
    ):
        read_model(await model_folder(str(open_folder), ""))


async def test_a_folder_that_may_not_be_read_names_its_owner_and_the_reader(open_folder: Path) -> None:
    with kept_out(open_folder.parent) as reader:
        with pytest.raises(StartupError, match=rf"Permission denied: {open_folder.parent} {reader}"):
            await model_folder(str(open_folder), "")
        with pytest.raises(CommandError, match=rf"--model .*Permission denied: {open_folder.parent} {reader}"):
            check(StackOptions(model=[str(open_folder)], port=free_port()))


def test_weights_that_are_cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for stored, message in ((len(whole) - 1, "cut off"), (100, "cut off"), (4, "cut off")):
        file.write_bytes(whole[:stored])
        with pytest.raises(StartupError, match=rf"model\.safetensors: .*{message}"):
            read_model(folder)
    file.write_bytes((20).to_bytes(8, "little") + b"x" * 40)
    with pytest.raises(StartupError, match=r"model\.safetensors: its safetensors header is broken"):
        read_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 15]}, "15 bytes of F32 are not of the shape"),
        ({"data_offsets": [-4, 12]}, "places from 0 on"),
        ({"data_offsets": [0.0, 16.0]}, "places from 0 on"),
        ({"data_offsets": [0, 16, 16]}, "values to unpack"),
        ({"data_offsets": [16, 0]}, "bytes of F32 are not"),
        ({"data_offsets": [16, 32]}, "a: begins at byte"),
        ({"shape": "ab"}, "expected a dtype and a shape"),
        ({"shape": [2.0, 2]}, "a shape and places"),
        ({"shape": [-2, -2]}, "a shape and places"),
        ({"dtype": []}, "expected a dtype and a shape"),
    ],
)
def test_a_header_of_other_values_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | change}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{message}"):
        read_header(file)


def test_weights_that_are_not_read_may_be_cut_off(folder: Path) -> None:
    identity = read_model(folder).identity
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    assert read_model(folder).identity == identity


_DEFAULT = "{% for m in messages %}\n  {{ m.role }}: {{ m.content }}\n{% endfor %}\n"
_TOOLS = (
    "\n{% macro named(tool) %}<{{ tool.function.name }}>{% endmacro %}\n{{ named(tools[0]) }}\n" + _DEFAULT + "  \n"
)


@pytest.mark.parametrize("in_files", [True, False])
def test_a_template_for_tools_is_used_as_transformers_does(in_files: bool, folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": _DEFAULT}
    if in_files:
        (folder / "chat_template.jinja").write_text(_DEFAULT)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(_TOOLS)
    else:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        named = {"rag": "x", "tool_use": _TOOLS, "default": _DEFAULT}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    file.write_text(json.dumps(config))
    template, reference = read_model(folder).chat_template, AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hello"}]
    tool = {"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}
    for tools in (None, [tool]):
        expected = reference.apply_chat_template(messages, tools=tools, tokenize=False)
        assert compile_template(template).render(messages=messages, tools=tools) == expected
        assert ("<find>" in expected) == bool(tools)


def test_a_broken_template_for_tools_is_refused_by_name(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{% if %}")
    with pytest.raises(StartupError, match=r"tool_use\.jinja: chat template, line 1"):
        read_model(folder)


@pytest.mark.parametrize("name", ["generation_config.json", "modules.json", "special_tokens_map.json"])
def test_broken_json(name: str, folder: Path) -> None:
    for text in ("{", "[" * 100_000):
        (folder / name).write_text(text)
        with pytest.raises(StartupError, match=rf"{name}: not JSON"):
            read_model(folder)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}\n{{ m.content }", "line 2: unexpected '}'"),
        ("{{ messages | nonsense }}", "line 1: No filter named 'nonsense'"),
        ([{"name": "default"}], "each of several must be an object"),
        ({"default": "x"}, "must be a text or a list"),
    ],
)
def test_an_empty_chat_template_is_absent(template: object, reason: str, folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": template}))
    with pytest.raises(StartupError, match=rf"tokenizer_config\.json: .*{re.escape(reason)}"):
        read_model(folder)
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(StartupError, match=rf"chat_template\.jinja: .*{re.escape(reason)}"):
            read_model(folder)
    file.write_text(json.dumps(config | {"chat_template": [{"name": "default", "template": "a"}]}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert read_model(folder).chat_template == "a"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", {"text_config": 5}, "text_config: 5 is not implemented"),
        ("config.json", {"eos_token_id": ""}, "eos_token_id: expected a token's id"),
        ("config.json", {"eos_token_id": [1, "x"]}, "eos_token_id: expected a token's id"),
        ("config.json", {"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "rope_scaling: factor: expected"),
        ("config.json", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling: factor: expected"),
        (
            "config.json",
            {"rope_scaling": {"rope_type": "longrope", "short_factor": 5}},
            "short_factor: expected a list",
        ),
        ("config.json", {"rope_scaling": {"rope_type": []}}, "rope_scaling: rope_type"),
        ("generation_config.json", {"eos_token_id": {}}, "eos_token_id: expected a token's id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"a": 1}}, "added_tokens_decoder.'a'.: expected an object"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "the id of 'a' must be a number"),
        ("added_tokens.json", {"a": None}, "the id of 'a' must be a number"),
        ("special_tokens_map.json", {"additional_special_tokens": 5}, "additional_special_tokens: expected a list"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_file_and_key(
    name: str, change: dict[str, object], message: str, folder: Path
) -> None:
    file = folder / name
    values = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(values | change))
    with pytest.raises(StartupError, match=message) as failure:
        read_model(folder)
    assert name in str(failure.value) or f"{folder}: its tokenizer's" in str(failure.value)


def test_recommended_sampling_is_read_from_the_generation_config(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text('{"temperature": 0.6, "top_p": null, "top_k": -1, "do_sample": true, "max_new_tokens": 5}')
    assert read_model(folder).sampling == SamplingDefaults(temperature=0.6, top_k=0)
    file.write_text('{"top_k": 20.0}')
    assert read_model(folder).sampling == SamplingDefaults(top_k=20)
    for wrong in ('"temperature": "hot"', '"top_p": 1.5', '"top_k": 2.5', '"repetition_penalty": true'):
        file.write_text(f"{{{wrong}}}")
        name = wrong.split('"')[1]
        with pytest.raises(StartupError, match=rf"generation_config\.json: `{name}` must be from"):
            read_model(folder)


def test_a_sequence_ends_with_the_end_tokens_of_all_files(folder: Path) -> None:
    """Of config, generation config and tokenizer; what the model has no token for is left out."""
    changes = {
        "config.json": {"eos_token_id": 5},
        "generation_config.json": {"eos_token_id": [7, 5, 10**6, -1]},
        "tokenizer_config.json": {"eos_token": "<|end|>"},
    }
    for name, change in changes.items():
        file = folder / name
        values = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(values | change))
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|end|>")
    assert read_model(folder).eos_token_ids == (7, 5, end)
