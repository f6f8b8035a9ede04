"""Models that see compute what transformers computes, however the prompt is cut."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from services.compute.backends.base import ModelBackend
from services.compute.backends.batch import ImageRows, StepBatch
from services.compute.backends.collectives import SingleRank
from services.compute.model.build import load_model
from services.compute.model.layers.vision import VisionTower, load_tower
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError
from tests.unit.compute.model import zoo
from tests.unit.compute.model.harness import Engine, Request

MEAN, STD = (0.4, 0.5, 0.6), (0.5, 0.3, 0.2)
IMAGE = 98  # the placeholder
N_TOKENS = 49  # rows of a frame


@dataclass
class SeeingEngine(Engine):
    """An engine whose placeholders have rows of images, in order."""

    states: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # [n_placeholders, hidden_size]

    def batch(self, work: list[tuple[Request, int]]) -> StepBatch:  # type: ignore[override]
        batch = super().batch(work)
        (request, n_rows), *others = work
        assert not others
        span = range(request.computed, request.computed + n_rows)
        rows = [row for row, position in enumerate(span) if request.ids[position] == IMAGE]
        if not rows:
            return batch
        before = request.ids[: request.computed].count(IMAGE)
        return replace(batch, images=ImageRows(torch.tensor(rows), self.states[before : before + len(rows)]))


@dataclass(frozen=True)
class Seen:
    folder: Path
    ids: list[int]
    frames: torch.Tensor  # uint8 [2, 28, 28, 3]
    logits: torch.Tensor  # [len(ids), vocab_size], transformers'


@pytest.fixture(scope="module", params=["smolvlm", "idefics3"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder, config = tmp_path_factory.mktemp(request.param), zoo.VARIANTS[request.param]()
    config.image_token_id = IMAGE
    model = zoo.write_checkpoint(config, folder)
    frames = torch.randint(256, (2, 28, 28, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    ids = [7, 8, *[IMAGE] * N_TOKENS, 9, *[IMAGE] * N_TOKENS, 3, 4, 5]
    pixels = (frames.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    with torch.inference_mode():
        answer = model(input_ids=torch.tensor([ids]), pixel_values=pixels.permute(0, 3, 1, 2)[None])
    return Seen(folder, ids, frames, answer.logits[0].float())


def tower_of(seen: Seen, backend: ModelBackend) -> VisionTower:
    model = describe(seen.folder)
    return load_tower(model, backend, model.spec.hidden_size, MEAN, STD)


@pytest.mark.parametrize("chunks", [[], [30, 1, 1, 40, 20], [1] * 12])
def test_logits_with_images_equal_transformers(seen: Seen, backend: ModelBackend, chunks: list[int]) -> None:
    model, tower = load_model(describe(seen.folder), SingleRank(), backend), tower_of(seen, backend)
    states = torch.cat([tower(frame.flatten()) for frame in seen.frames])
    engine = SeeingEngine(model, states=states)
    logits = model.logits(engine.run(seen.ids, chunks)).cpu()[:, : seen.logits.shape[1]]
    assert (logits - seen.logits).abs().max() <= 1e-4
    blind = model.logits(Engine(model).run(seen.ids, chunks)).cpu()[:, : seen.logits.shape[1]]
    assert (blind - seen.logits).abs().max() > 1e-2


def test_tower_needs_every_tensor(seen: Seen, backend: ModelBackend, tmp_path: Path) -> None:
    model = describe(seen.folder)
    assert model.spec.vision is not None
    assert model.spec.vision.frame_tokens == N_TOKENS
    absent = replace(model, spec=replace(model.spec, vision=replace(model.spec.vision, n_layers=3)))
    with pytest.raises(ModelError, match=r"encoder\.layers\.2\..*: missing"):
        load_tower(absent, backend, model.spec.hidden_size, MEAN, STD)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_attention_heads": 3}, "vision_config.num_attention_heads"),
        ({"image_size": 27}, "vision_config.image_size"),
        ({"num_channels": 1}, "vision_config.num_channels"),
        ({"hidden_act": "swoosh"}, "vision_config.hidden_act"),
        ({"rotary": True}, "vision_config.rotary"),
    ],
)
def test_tower_with_unknown_settings_is_refused(changed: dict[str, object], named: str, tmp_path: Path) -> None:
    config = zoo.VARIANTS["smolvlm"]()
    values = config.to_dict()
    values |= {"architectures": ["SmolVLMForConditionalGeneration"], "vision_config": values["vision_config"] | changed}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    with pytest.raises(ModelError, match=named):
        describe(tmp_path)
