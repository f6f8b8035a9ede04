"""Names of GGUF files: parts of one model, and the choice among several."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.gguf_files import choose, find_model, model_name, parts_of, split_choice

NAMES = [
    *("m-Q4_K_M.gguf", "m-IQ4_K_M.gguf", "mmproj-Q8_0.gguf", "README.md"),
    *("big/m.Q8_0-00001-of-00002.gguf", "big/m.Q8_0-00002-of-00002.gguf"),
]


def test_a_choice_follows_the_last_colon(tmp_path: Path) -> None:
    assert split_choice("owner/name:Q4_K_M") == ("owner/name", "Q4_K_M")
    assert split_choice("owner/name") == ("owner/name", "")
    (tmp_path / "a:b").mkdir()
    assert split_choice(f"{tmp_path}/a:b") == (f"{tmp_path}/a:b", "")  # that is its name


def test_names_without_an_ending() -> None:
    assert model_name("a/m-Q4_K_M.gguf") == "m-Q4_K_M"
    assert model_name("a/m-00002-of-00003.gguf") == "m"
    assert model_name("owner/name:Q4_K_M") == "name:Q4_K_M"


def test_parts_of_a_model() -> None:
    assert parts_of("m.gguf") == ("m.gguf",)
    assert parts_of("m-00002-of-00002.gguf") == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    with pytest.raises(ValueError, match="number is from 1 to 2"):
        parts_of("m-00003-of-00002.gguf")


def test_a_file_is_chosen_among_several_models(tmp_path: Path) -> None:
    assert choose(NAMES, "q4_k_m") == "m-Q4_K_M.gguf"
    assert choose(NAMES, "Q8_0") == "big/m.Q8_0-00001-of-00002.gguf"
    assert choose(["README.md"], "") is None
    with pytest.raises(ValueError, match=r":Q8_0 chooses among GGUF files, and there is none"):
        choose(["README.md"], "Q8_0")
    with pytest.raises(ValueError, match=r"3 GGUF models fit ''; choose .* among big/m.Q8_0-00001"):
        choose(NAMES, "")
    with pytest.raises(ValueError, match="no GGUF file fits 'Q5_0'"):
        choose(NAMES, "Q5_0")
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_model(tmp_path, "Q8_0") == tmp_path / "big/m.Q8_0-00001-of-00002.gguf"
