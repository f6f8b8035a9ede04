"""The rule of which files of a repository are served."""

from __future__ import annotations

import pytest

from services.common.hub import served_files

GGUF = ("m-Q4_0.gguf", "m-Q8_0.gguf", "F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf", "config.json")
FOLDER = ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("names", "choice", "served"),
    [
        (GGUF, "Q8_0", ["m-Q8_0.gguf"]),
        (GGUF, "F16", ["F16/m-F16-00001-of-00002.gguf", "F16/m-F16-00002-of-00002.gguf"]),
        ((*GGUF, "model.safetensors"), "", ["config.json", "model.safetensors"]),
        ((*GGUF, "model.safetensors"), "q4_0", ["m-Q4_0.gguf"]),
        (("model.safetensors", "m.gguf"), "", ["m.gguf"]),
        ((*FOLDER, "1_Pooling/config.json", "onnx/config.json", "a/model.safetensors", "pytorch_model.bin"), "",
         ["1_Pooling/config.json", "config.json", "model.safetensors"]),
    ],
)  # fmt: skip
def test_a_folder_of_safetensors_or_one_gguf_model_is_served(
    names: tuple[str, ...], choice: str, served: list[str]
) -> None:
    assert served_files(names, choice) == served


@pytest.mark.parametrize(
    ("names", "choice", "message"),
    [
        (GGUF, "", "3 GGUF models fit ''; choose"),
        (FOLDER, "Q8_0", ":Q8_0 chooses among GGUF files, and there is none"),
        (("model.safetensors",), "", "no config.json with safetensors and no GGUF file to serve"),
        (("config.json", "pytorch_model.bin"), "", "no config.json with safetensors and no GGUF file to serve"),
        (GGUF[:-2], "F16", "F16/m-F16-00002-of-00002.gguf is missing next to F16/m-F16-00001-of-00002.gguf"),
        (("../a.gguf",), "", "the hub names a file outside of the model: ../a.gguf"),
        ((*FOLDER, "/etc/x.json"), "", "the hub names a file outside of the model: /etc/x.json"),
    ],
)
def test_other_repositories_are_refused_with_the_reason(names: tuple[str, ...], choice: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        served_files(names, choice)
