"""Qwen 2.5 VL computes what transformers computes, for images of any size, however the prompt is cut."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

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
from services.compute.model.footprint import tower_elements
from services.compute.model.layers.towers import load_tower
from services.compute.model.loading.folder import open_folder
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError, ModelSpec
from services.worker.rank.places import Span, places_of
from tests.unit.compute.model import zoo
from tests.unit.compute.model.harness import CPU, Engine, Request, ThreadRank, load_changed, run_ranks

IMAGE, PATCH, SQUARE = 98, 2, 2  # the placeholder
VISION = {"depth": 3, "patch_size": PATCH, "window_size": 8, "fullatt_block_indexes": [1]}
SIZES = ((3, 5), (1, 2), (4, 4))  # lines and columns of the images' rows


@dataclass(frozen=True)
class Seen:
    folder: Path
    ids: list[int]
    spans: list[Span]
    states: torch.Tensor  # [n_placeholders, hidden_size]
    logits: torch.Tensor  # [len(ids), vocab_size], transformers'


@dataclass
class PlacedEngine(Engine):
    """An engine whose placeholders have rows of images, and whose rows have places."""

    seen: Seen = field(kw_only=True)

    def batch(self, work: list[tuple[Request, int]]) -> StepBatch:  # type: ignore[override]
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


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder, config = tmp_path_factory.mktemp("qwen2_5_vl"), zoo.VARIANTS["qwen2_5_vl_multimodal"]()
    for key, value in VISION.items():
        setattr(config.vision_config, key, value)
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
    found = describe(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = [file.get_slice(name).get_shape() for name in file.keys() if "visual." in name]  # noqa: SIM118
    assert tower_elements(found.spec) == sum(math.prod(shape) for shape in stored if len(shape) > 1)
    images = open_folder(folder).images
    assert images is not None
    tower = load_tower(found, TorchBackend(torch.float32, CPU), found.spec.hidden_size, images.mean, images.std)
    states = []
    for picture, (_, columns) in zip(pictures, SIZES, strict=True):
        pixels = torch.from_numpy(picture).flatten()
        whole = tower(pixels, 0, tower.n_layers, columns)
        assert torch.equal(whole, tower(tower(pixels, 0, 2, columns), 2, tower.n_layers, columns))
        states.append(whole)
    return Seen(folder, ids, spans, torch.cat(states), answer.logits[0].float())


@pytest.mark.parametrize("chunks", [[], [10, 1, 1, 20], [1] * 40])
def test_logits_with_images_equal_transformers(seen: Seen, backend: ModelBackend, chunks: list[int]) -> None:
    model = load_model(describe(seen.folder), SingleRank(), backend)
    logits = model.logits(PlacedEngine(model, seen=seen).run(seen.ids, chunks)).cpu()[:, : seen.logits.shape[1]]
    assert (logits - seen.logits).abs().max() <= 1e-4
    flat = replace(seen, spans=[(first, 1, lines * columns) for first, lines, columns in seen.spans])
    unplaced = model.logits(PlacedEngine(model, seen=flat).run(seen.ids, chunks)).cpu()[:, : seen.logits.shape[1]]
    assert (unplaced - seen.logits).abs().max() > 1e-3


def test_logits_with_images_depend_on_the_ropes_sections(seen: Seen) -> None:
    def exchanged(spec: ModelSpec) -> ModelSpec:
        (rope,) = spec.ropes
        assert rope.sections == (2, 2, 2)
        layers = (replace(layer, rope=replace(rope, sections=(4, 1, 1))) for layer in spec.layers)
        return replace(spec, layers=tuple(layers))

    model = load_changed(seen.folder, exchanged)
    logits = model.logits(PlacedEngine(model, seen=seen).run(seen.ids, []))[:, : seen.logits.shape[1]]
    assert (logits - seen.logits).abs().max() > 1e-3


def test_logits_with_images_on_two_ranks_equal_transformers(seen: Seen) -> None:
    def compute(rank: ThreadRank) -> torch.Tensor:
        model = load_model(describe(seen.folder), rank, TorchBackend(torch.float32, CPU))
        engine = PlacedEngine(model, rank, seen=seen)
        return rank.all_gather(model.logits(engine.run(seen.ids, [11]))).transpose(0, 1).flatten(1)

    for logits in run_ranks(2, compute):
        assert (logits[:, : seen.logits.shape[1]] - seen.logits).abs().max() <= 1e-4


def test_published_model_sees_where_its_folder_says_how_images_are_prepared(tmp_path: Path) -> None:
    published = (Path(__file__).parent / "published/qwen_vl.jsonl").read_text().splitlines()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(published[0])["config"]))
    assert describe(tmp_path).spec.vision is None
    settings = {
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    folder = open_folder(tmp_path)
    vision, images = folder.spec.vision, folder.images
    assert vision is not None
    assert images is not None
    assert (vision.frame_tokens, vision.window, vision.full_layers) == (16_384, 4, (7, 15, 23, 31))
    assert (images.least_pixels, images.most_pixels, images.resample) == (3136, 12_845_056, "bicubic")
    assert {rope.sections for rope in folder.spec.ropes} == {(16, 24, 24)}


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
    seen: Seen, changed: dict[str, object], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((seen.folder / "config.json").read_text())
    settings = json.loads((seen.folder / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | changed))
    with pytest.raises(ModelError, match=named):
        _ = open_folder(tmp_path).images
