"""Models that see compute what transformers computes, however the prompt is cut."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from services.compute.backends.base import ModelBackend
from services.compute.backends.batch import FrameRows, ImageRows, StepBatch
from services.compute.backends.collectives import SingleRank
from services.compute.backends.torch.backend import TorchBackend
from services.compute.model.build import load_model
from services.compute.model.layers.towers import load_tower
from services.compute.model.layers.vision import VisionTower
from services.compute.model.loading.folder import open_folder
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError
from tests.unit.compute.model import zoo
from tests.unit.compute.model.harness import CPU, CachedDecoder, DecoderRequest, ThreadRank, run_ranks

MEAN, STD = (0.4, 0.5, 0.6), (0.5, 0.3, 0.2)
IMAGE = 98  # the placeholder
N_TOKENS = 49  # rows of a frame
FRAMES = (range(2, 51), range(52, 101))  # positions of their rows


@dataclass
class SeeingEngine(CachedDecoder):
    """An engine whose placeholders have rows of images, in order; steps end with frames where these are whole."""

    states: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # [n_placeholders, hidden_size]

    def batch(self, work: list[tuple[DecoderRequest, int]]) -> StepBatch:  # type: ignore[override]
        batch = super().batch(work)
        (request, n_rows), *others = work
        assert not others
        span = range(request.computed, request.computed + n_rows)
        rows = [row for row, position in enumerate(span) if request.ids[position] == IMAGE]
        if not rows:
            return batch
        before = request.ids[: request.computed].count(IMAGE)
        shown = [frame for frame in FRAMES if frame.start < span.stop and frame.stop > span.start]
        frames = [
            FrameRows(0, max(frame.start - span.start, 0), frame.stop - max(span.start, frame.start), frame.stop)
            for frame in shown
        ]
        states = self.states[before : before + len(rows)]
        return replace(batch, images=ImageRows(torch.tensor(rows), states, tuple(frames)))


@dataclass(frozen=True)
class Seen:
    folder: Path
    ids: list[int]
    frames: torch.Tensor  # uint8 [2, 28, 28, 3]
    logits: torch.Tensor  # [len(ids), vocab_size], transformers'
    whole_frames: bool


@pytest.fixture(scope="module", params=["smolvlm", "idefics3", "gemma3_multimodal"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder, config = tmp_path_factory.mktemp(request.param), zoo.VARIANTS[request.param]()
    model = zoo.write_checkpoint(config, folder)
    pixels = torch.randint(256, (2, 28, 28, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    ids = [7, 8, *[IMAGE] * N_TOKENS, 9, *[IMAGE] * N_TOKENS, 3, 4, 5]
    values = ((pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)
    inputs: dict[str, torch.Tensor] = {"pixel_values": values[None]}
    if whole_frames := request.param == "gemma3_multimodal":
        size = {"size": {"height": 28, "width": 28}}
        (folder / "preprocessor_config.json").write_text(json.dumps(size))
        inputs = {"pixel_values": values, "token_type_ids": torch.tensor([ids]).eq(IMAGE).long()}
    with torch.inference_mode():
        answer = model(input_ids=torch.tensor([ids]), **inputs)
    return Seen(folder, ids, pixels, answer.logits[0].float(), whole_frames)


def tower_of(seen: Seen, backend: ModelBackend) -> VisionTower:
    model = describe(seen.folder)
    tower = load_tower(model, backend, model.spec.hidden_size, MEAN, STD)
    assert isinstance(tower, VisionTower)
    return tower


def states_of(seen: Seen, backend: ModelBackend) -> torch.Tensor:
    tower = tower_of(seen, backend)
    return torch.cat([tower(frame.flatten(), 0, tower.n_layers, 7) for frame in seen.frames])


def whole(chunks: list[int]) -> list[int]:
    """Chunks that end with a frame where these end within it."""
    cuts = [next((frame.stop for frame in FRAMES if end in frame), end) for end in itertools.accumulate(chunks)]
    return [end - start for start, end in itertools.pairwise(dict.fromkeys([0, *cuts]))]


@pytest.mark.parametrize("chunks", [[], [30, 1, 1, 40, 20], [1] * 12])
def test_logits_with_images_equal_transformers(seen: Seen, backend: ModelBackend, chunks: list[int]) -> None:
    chunks = whole(chunks) if seen.whole_frames else chunks
    model = load_model(describe(seen.folder), SingleRank(), backend)
    engine = SeeingEngine(model, states=states_of(seen, backend))
    logits = model.logits(engine.run(seen.ids, chunks)).cpu()[:, : seen.logits.shape[1]]
    assert (logits - seen.logits).abs().max() <= 1e-4
    blind = model.logits(CachedDecoder(model).run(seen.ids, chunks)).cpu()[:, : seen.logits.shape[1]]
    assert (blind - seen.logits).abs().max() > 1e-2


@pytest.mark.parametrize("start", [48, 56])
def test_logits_after_a_cached_prefix_equal_transformers(seen: Seen, backend: ModelBackend, start: int) -> None:
    """The cache holds the first rows of a frame, and their step computed the whole frame."""
    model = load_model(describe(seen.folder), SingleRank(), backend)
    engine = SeeingEngine(model, states=states_of(seen, backend))
    first = engine.admit(seen.ids)
    engine.step([(first, len(seen.ids))])
    again = DecoderRequest(first.ids, first.table, computed=start)
    (hidden,) = engine.step([(again, len(seen.ids) - start)])
    logits = model.logits(hidden).cpu()[:, : seen.logits.shape[1]]
    assert (logits - seen.logits[start:]).abs().max() <= 1e-4


def test_logits_with_images_on_two_ranks_equal_transformers(seen: Seen) -> None:
    def compute(rank: ThreadRank) -> torch.Tensor:
        backend = TorchBackend(torch.float32, CPU)
        model = load_model(describe(seen.folder), rank, backend)
        engine = SeeingEngine(model, rank, states=states_of(seen, backend))
        return rank.all_gather(model.logits(engine.run(seen.ids, [51]))).transpose(0, 1).flatten(1)

    for logits in run_ranks(2, compute):
        assert (logits[:, : seen.logits.shape[1]] - seen.logits).abs().max() <= 1e-4


def test_tower_computed_in_parts_has_the_same_bits(seen: Seen, backend: ModelBackend) -> None:
    tower, pixels = tower_of(seen, backend), seen.frames[0].flatten()
    assert tower.n_layers > 1
    for cut in range(tower.n_layers):
        x = tower(pixels, 0, cut, 7) if cut else pixels
        assert torch.equal(tower(x, cut, tower.n_layers, 7), tower(pixels, 0, tower.n_layers, 7))


def test_tower_needs_every_tensor(seen: Seen, backend: ModelBackend, tmp_path: Path) -> None:
    model = describe(seen.folder)
    assert model.spec.vision is not None
    assert model.spec.vision.frame_tokens == N_TOKENS
    absent = replace(model, spec=replace(model.spec, vision=replace(model.spec.vision, n_layers=3)))
    with pytest.raises(ModelError, match=r"encoder\.layers\.2\..*: missing"):
        load_tower(absent, backend, model.spec.hidden_size, MEAN, STD)


def write_config(folder: Path, variant: str, **changed: object) -> None:
    config = zoo.VARIANTS[variant]()
    architecture = {"smolvlm": "SmolVLM", "gemma3_multimodal": "Gemma3"}[variant] + "ForConditionalGeneration"
    values = config.to_dict() | {"architectures": [architecture]}
    vision = {key: changed.pop(key) for key in [*changed] if key not in values}
    values |= {**changed, "vision_config": values["vision_config"] | vision}
    (folder / "config.json").write_text(json.dumps(values, default=str))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_attention_heads": 3}, "vision_config.num_attention_heads"),
        ({"image_size": 27}, "vision_config.image_size"),
        ({"num_channels": 1}, "vision_config.num_channels"),
        ({"hidden_act": "swoosh"}, "vision_config.hidden_act"),
        ({"rotary": True}, "vision_config.rotary"),
        ({"image_token_id": 99}, "image_token_id: expected an id below vocab_size 99"),
    ],
)
def test_tower_with_unknown_settings_is_refused(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    write_config(tmp_path, "smolvlm", **changed)
    with pytest.raises(ModelError, match=named):
        describe(tmp_path)


SIZE = {"height": 28, "width": 28}


@pytest.mark.parametrize(
    ("changed", "settings", "named"),
    [
        ({}, {"size": {"height": 28, "width": 56}}, "size: expected height and width 28"),
        ({}, {"size": {"longest_edge": 28}}, "size: expected height and width 28"),
        ({}, {"size": SIZE, "do_pan_and_scan": True}, "do_pan_and_scan: True"),
        ({}, {"size": SIZE, "do_normalize": False}, "do_normalize: False"),
        ({}, {"size": SIZE, "resample": 9}, "resample"),
        ({"mm_tokens_per_image": 50}, {"size": SIZE}, "mm_tokens_per_image: expected a square"),
        ({"mm_tokens_per_image": 25}, {"size": SIZE}, "mm_tokens_per_image: expected a square"),
    ],
)
def test_frames_with_unknown_settings_are_refused(
    changed: dict[str, object], settings: dict[str, object], named: str, tmp_path: Path
) -> None:
    write_config(tmp_path, "gemma3_multimodal", **changed)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=named):
        _ = open_folder(tmp_path).images


def test_gemma_3_sees_where_its_folder_says_how_images_are_prepared(tmp_path: Path) -> None:
    write_config(tmp_path, "gemma3_multimodal")
    blind = open_folder(tmp_path)
    assert (blind.spec.vision, blind.images) == (None, None)
    assert "reads text alone" in blind.spec.left_out
    settings = {"size": SIZE, "do_pan_and_scan": None, "do_convert_rgb": None, "image_mean": None}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    seeing = open_folder(tmp_path)
    assert seeing.spec.vision is not None
    assert seeing.images is not None
    assert (seeing.images.longest_edge, seeing.images.splits, seeing.images.resample) == (0, False, "bilinear")
    assert not seeing.spec.left_out
