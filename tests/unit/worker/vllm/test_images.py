"""Images of vLLM's models: gateways learn how they are cut, and images reach vLLM whole."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from ryzanstein.v1 import worker_pb2 as pb

from services.compute.model.spec import ModelError
from services.worker.engine.request import EngineRequest
from services.worker.vllm.images import CoreImage, images_of, images_taken
from tests.seeing_model import FAMILIES


def configured(folder: Path, n_images: int = 999, **given: Any) -> Any:
    """vLLM's configuration of a folder's model; `given` to its processor."""
    config = transformers.AutoConfig.from_pretrained(folder)
    multimodal = SimpleNamespace(get_limit_per_prompt=lambda kind: n_images, mm_processor_kwargs=given or None)
    return SimpleNamespace(hf_config=config, architectures=config.architectures, multimodal_config=multimodal)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {layout: tmp_path_factory.mktemp(layout) for layout in FAMILIES}
    for layout, folder in folders.items():
        FAMILIES[layout].write(folder)
    return folders


@pytest.mark.parametrize("layout", ["gemma3", "qwen2_5_vl"])
def test_card_says_how_the_model_s_images_are_cut(folders: dict[str, Path], layout: str) -> None:
    served, expected = configured(folders[layout]), pb.ImageInput()
    expected.CopyFrom(FAMILIES[layout].card)
    expected.token = served.hf_config.image_token_id
    assert images_taken(served, folders[layout]) == expected


def test_bounds_for_vllm_s_processor_are_those_of_gateways(folders: dict[str, Path]) -> None:
    folder = folders["qwen2_5_vl"]
    takes = images_taken(configured(folder, max_pixels=2048, device="cuda"), folder)
    assert takes is not None
    assert (takes.least_pixels, takes.most_pixels, takes.frame_tokens) == (512, 2048, 32)


def test_models_without_images_serve_texts(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["gemma3"]
    texts = configured(folder)
    texts.multimodal_config = None
    assert images_taken(texts, folder) is None
    assert images_taken(configured(folder, n_images=0), folder) is None
    assert images_taken(configured(folder), tmp_path) is None  # no image processor
    assert images_taken(configured(folders["idefics3"]), folders["idefics3"]) is None


@pytest.mark.parametrize(
    ("layout", "changed", "given", "named"),
    [
        ("gemma3", {"do_pan_and_scan": True}, {}, "do_pan_and_scan: gateways do not know True"),
        ("gemma3", {"size": {"height": 28, "width": 14}}, {}, "size: expected an equal height and width"),
        ("gemma3", {"resample": 9}, {}, "resample: expected a number from 0 to 5, found 9"),
        ("qwen2_5_vl", {"do_resize": False}, {}, "do_resize: gateways do not know False"),
        ("qwen2_5_vl", {}, {"max_pixels": 5}, "expected max_pixels, 5, at most"),
        ("qwen2_5_vl", {}, {"fps": 2}, "mm_processor_kwargs: fps: gateways know max_pixels, min_pixels alone"),
    ],
)
def test_image_processors_beyond_gateways_are_named(
    folders: dict[str, Path], tmp_path: Path, layout: str, changed: dict[str, Any], given: dict[str, Any], named: str
) -> None:
    name = "preprocessor_config.json"
    stored = json.loads((folders[layout] / name).read_text())
    (tmp_path / name).write_text(json.dumps(stored | changed))
    with pytest.raises(ModelError, match=named):
        images_taken(configured(folders[layout], **given), tmp_path)


@pytest.mark.parametrize(
    ("takes", "image", "size"),
    [
        (pb.ImageInput(frame_size=2), pb.Image(first=3, tokens=1, frames=bytes(12), digest=b"a"), (2, 2)),
        (pb.ImageInput(cell=2), pb.Image(first=3, tokens=6, frames=bytes(72), digest=b"a", columns=3), (6, 4)),
    ],
)
def test_images_reach_vllm_with_their_sides(takes: pb.ImageInput, image: pb.Image, size: tuple[int, int]) -> None:
    request = EngineRequest("r", [1] * 9, pb.Sampling(), images=[image])
    assert images_of(request, takes) == (CoreImage(3, image.tokens, *size, image.frames, "61"),)
