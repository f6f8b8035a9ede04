"""Qwen 2.5 VL and Qwen 3 VL compute what transformers computes, for images of any size, however the prompt is cut."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from services.compute.backends.base import ModelBackend
from services.compute.backends.batch import FrameRows, ImageRows, StepBatch
from services.compute.backends.collectives import SingleRank
from services.compute.backends.torch.backend import TorchBackend
from services.compute.model.build import load_model
from services.compute.model.decoder import Residual
from services.compute.model.footprint import tower_elements
from services.compute.model.layers.towers import load_tower
from services.compute.model.loading.folder import open_folder
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError, ModelSpec
from services.worker.rank.places import Span, places_of
from tests.unit.compute.model import zoo
from tests.unit.compute.model.harness import CPU, CachedDecoder, DecoderRequest, ThreadRank, load_changed, run_ranks

IMAGE, PATCH, SQUARE = 98, 2, 2  # the placeholder
_QWEN3: dict[str, Any] = {"depth": 3, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"depth": 3, "window_size": 8, "fullatt_block_indexes": [1]},
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}
SIZES = ((3, 5), (1, 2), (1, 1), (4, 4))  # lines and columns of the images' rows


@dataclass(frozen=True)
class SeenGrid:
    folder: Path
    ids: list[int]
    spans: list[Span]
    states: torch.Tensor  # [n_placeholders, (1 + n_deep) * hidden_size]
    logits: torch.Tensor  # [len(ids), vocab_size], transformers'


@dataclass
class PlacedEngine(CachedDecoder):
    """An engine whose placeholders have rows of images, and whose rows have places."""

    seen: SeenGrid = field(kw_only=True)

    def batch(self, work: list[tuple[DecoderRequest, int]]) -> StepBatch:  # type: ignore[override]
        batch, ((request, n_rows),) = super().batch(work), work
        span = range(request.computed, request.computed + n_rows)
        known, shift = places_of(self.seen.spans)
        later = np.arange(known.shape[1], len(request.ids)) + shift
        places = torch.from_numpy(np.concatenate((known, np.tile(later, (3, 1))), 1)[:, span.start : span.stop])
        rows = [row for row, position in enumerate(span) if request.ids[position] == IMAGE]
        if not rows:
            return replace(batch, positions=places[0].contiguous())
        before = request.ids[: request.computed].count(IMAGE)
        states = self.seen.states[before : before + len(rows)]
        images = ImageRows(torch.tensor(rows), states, (FrameRows(0, 0, 0, 0),))
        return replace(batch, images=images, places=places)


@pytest.fixture(scope="module", params=VISION)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SeenGrid:
    folder, config = tmp_path_factory.mktemp(request.param), zoo.VARIANTS[f"{request.param}_multimodal"]()
    for key, value in (VISION[request.param] | {"patch_size": PATCH}).items():
        setattr(config.vision_config, key, value)
    if "window_size" not in VISION[request.param]:
        config.text_config.num_hidden_layers = 3  # the last one adds no rows of deep layers
    config.image_token_id = IMAGE
    model = zoo.write_checkpoint(config, folder)
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=SQUARE, size={"shortest_edge": 4, "longest_edge": 400}
    )
    processor.save_pretrained(folder)
    ids, spans, pictures = [7, 8], [], []
    rng = np.random.default_rng(3)
    for lines, columns in SIZES:
        spans.append((len(ids), lines, columns))
        ids += [IMAGE] * (lines * columns) + [9, 10]
        pictures.append(rng.integers(256, size=(lines * PATCH * SQUARE, columns * PATCH * SQUARE, 3), dtype=np.uint8))
    ids += [3, 4, 5]
    shown = [Image.fromarray(picture) for picture in pictures]
    inputs = processor.preprocess(shown, do_resize=False, return_tensors="pt")
    with torch.inference_mode():
        kinds = torch.tensor([ids]).eq(IMAGE).long()
        answer = model(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, **inputs)
    actual = describe(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = [file.get_slice(name).get_shape() for name in file.keys() if "visual." in name]  # noqa: SIM118
    assert tower_elements(actual.spec) == sum(math.prod(shape) for shape in stored if len(shape) > 1)
    images = open_folder(folder).images
    assert images is not None
    tower = load_tower(actual, TorchBackend(torch.float32, CPU), actual.spec.hidden_size, images.mean, images.std)
    states = []
    for picture, (_, columns) in zip(pictures, SIZES, strict=True):
        pixels = torch.from_numpy(picture).flatten()
        states.append(tower(pixels, 0, tower.n_layers, columns))
        for number in range(tower.n_layers):
            pixels = tower(pixels, number, number + 1, columns)
        assert torch.equal(pixels, states[-1])
    return SeenGrid(folder, ids, spans, torch.cat(states), answer.logits[0].float())


@pytest.mark.parametrize("chunks", [[], [7, 2, 3, 11, 5], [1] * 40])
def test_logits_with_images_equal_transformers(seen: SeenGrid, backend: ModelBackend, chunks: list[int]) -> None:
    model = load_model(describe(seen.folder), SingleRank(), backend)
    logits = model.logits(PlacedEngine(model, seen=seen).run(seen.ids, chunks)).cpu()[:, : seen.logits.shape[1]]
    assert (logits - seen.logits).abs().max() <= 1e-4
    flat = replace(seen, spans=[(first, 1, lines * columns) for first, lines, columns in seen.spans])
    unplaced = model.logits(PlacedEngine(model, seen=flat).run(seen.ids, chunks)).cpu()[:, : seen.logits.shape[1]]
    assert (unplaced - seen.logits).abs().max() > 1e-3


def test_logits_with_images_depend_on_the_ropes_axes(seen: SeenGrid) -> None:
    def exchanged(spec: ModelSpec) -> ModelSpec:
        (rope,) = spec.ropes
        assert rope.axes == ((0, 0, 1, 1, 2, 2) if seen.folder.name.startswith("qwen2") else (0, 1, 2, 0, 1, 2))
        layers = (replace(layer, rope=replace(rope, axes=(0, 0, 0, 0, 1, 2))) for layer in spec.layers)
        return replace(spec, layers=tuple(layers))

    model = load_changed(seen.folder, exchanged)
    logits = model.logits(PlacedEngine(model, seen=seen).run(seen.ids, []))[:, : seen.logits.shape[1]]
    assert (logits - seen.logits).abs().max() > 1e-3


def test_logits_with_images_depend_on_each_deep_layer(seen: SeenGrid, backend: ModelBackend) -> None:
    model = load_model(describe(seen.folder), SingleRank(), backend)
    size, vision = model.spec.hidden_size, model.spec.vision
    assert vision is not None
    n_deep = len(vision.deep_layers)
    assert seen.states.shape[1] == (1 + n_deep) * size
    for number in range(1, 1 + n_deep):
        states = seen.states.clone()
        states[:, number * size : (number + 1) * size] = 0
        engine = PlacedEngine(model, seen=replace(seen, states=states))
        logits = model.logits(engine.run(seen.ids, [])).cpu()[:, : seen.logits.shape[1]]
        assert (logits - seen.logits).abs().max() > 1e-3


def test_states_added_to_rows_of_images_change_no_other_row(backend: ModelBackend) -> None:
    norm = backend.ops.rms_norm(torch.rand(48, device=backend.device), 1e-6)
    x, added, rows = torch.randn(5, 48), torch.randn(2, 48), torch.tensor([1, 3])
    x, added, rows = (one.to(backend.device) for one in (x, added, rows))
    changed = Residual(x.clone(), norm(x)).with_added(rows, added, norm)
    others = [0, 2, 4]
    assert changed.normed is not None
    assert torch.equal(changed.x[others], x[others])
    assert torch.equal(changed.normed[others], norm(x)[others])
    assert torch.equal(changed.x[rows], x[rows] + added)
    assert torch.allclose(changed.normed, norm(changed.x), atol=1e-6)


def test_logits_with_images_on_two_ranks_equal_transformers(seen: SeenGrid) -> None:
    def compute(rank: ThreadRank) -> torch.Tensor:
        model = load_model(describe(seen.folder), rank, TorchBackend(torch.float32, CPU))
        engine = PlacedEngine(model, rank, seen=seen)
        return rank.all_gather(model.logits(engine.run(seen.ids, [11]))).transpose(0, 1).flatten(1)

    for logits in run_ranks(2, compute):
        assert (logits[:, : seen.logits.shape[1]] - seen.logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "patch", "bounds", "vision", "resized"),
    [
        (
            "Qwen/Qwen2.5-VL-7B-Instruct",
            14,
            {"min_pixels": 3136, "max_pixels": 12_845_056},
            {"frame_tokens": 16_384, "window": 4, "full_layers": (7, 15, 23, 31), "deep_layers": ()},
            (3136, 12_845_056),
        ),
        (
            "Qwen/Qwen3-VL-4B-Instruct",
            16,
            {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
            {"frame_tokens": 16_384, "window": 0, "table_side": 48, "deep_layers": (5, 11, 17)},
            (65_536, 16_777_216),
        ),
    ],
)
def test_published_model_sees_where_its_folder_says_how_images_are_prepared(
    name: str, patch: int, bounds: dict[str, Any], vision: dict[str, Any], resized: tuple[int, int], tmp_path: Path
) -> None:
    published = map(json.loads, (Path(__file__).parent / "published/qwen_vl.jsonl").read_text().splitlines())
    config = next(row["config"] for row in published if row["name"] == name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(tmp_path).spec.vision is None
    settings = {**bounds, "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    folder = open_folder(tmp_path)
    images, (rope,) = folder.images, folder.spec.ropes
    assert images is not None
    assert {key: getattr(folder.spec.vision, key) for key in vision} == vision
    assert (images.least_pixels, images.most_pixels, images.resample) == (*resized, "bicubic")
    scaling = (config.get("text_config") or config)["rope_scaling"]
    assert [rope.axes.count(axis) for axis in range(3)] == scaling["mrope_section"]
    assert (rope.axes[:3] == (0, 1, 2)) == scaling.get("mrope_interleaved", False)


@pytest.mark.parametrize(
    ("variant", "section", "changed", "named"),
    [
        ("qwen3_vl", "vision_config", {"num_position_embeddings": 24}, "num_position_embeddings: expected the square"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [1, 0]}, "indexes: expected ascending numbers"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [3]}, "numbers of layers below depth 3"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": ["a"]}, "indexes: expected a list of numbers"),
        ("qwen3_vl", "vision_config", {"rope_parameters": {"rope_theta": 10.0}}, "rope_parameters: .* not implemented"),
        ("qwen3_vl", "text_config", {"num_hidden_layers": 2}, "deepstack_visual_indexes: expected less than 2"),
        ("qwen3_vl", "text_config", {"rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved: expected true"),
        ("qwen3_vl_moe", "text_config", {"norm_topk_prob": False}, "norm_topk_prob: False is not implemented"),
        ("qwen2_5_vl", "text_config", {"rope_scaling": {"mrope_interleaved": True}}, "interleaved: expected false"),
    ],
)
def test_models_that_see_with_unknown_settings_are_refused(
    variant: str, section: str, changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = json.loads(zoo.VARIANTS[f"{variant}_multimodal"]().to_json_string())
    config["image_token_id"] = IMAGE
    config["vision_config"] |= VISION[variant]
    config[section] |= changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"merge_size": SQUARE}))
    with pytest.raises(ModelError, match=named):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"patch_size": 4}, "patch_size: expected 2, as in config.json, found 4"),
        ({"min_pixels": 500}, "min_pixels: expected max_pixels, 400, at most"),
        ({"max_pixels": "many"}, "max_pixels: expected a number of pixels"),
        ({"max_pixels": 12}, "max_pixels: expected 4 to 65536 patches"),
    ],
)
def test_images_with_unknown_settings_are_refused(
    seen: SeenGrid, changed: dict[str, object], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((seen.folder / "config.json").read_text())
    settings = json.loads((seen.folder / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | changed))
    with pytest.raises(ModelError, match=named):
        _ = open_folder(tmp_path).images
