"""A worker's reading of the fields of a Submit."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import image_digest
from services.common.grammar import MAX_GRAMMAR_BYTES
from services.worker.api.submits import MAX_LOGIT_BIAS, to_request
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.state import EngineFacts
from services.worker.native.live import frames_of
from tests.unit.worker.engine.stand_ins import MODEL

FACTS = EngineFacts(2000, 8, 256, {}, {}, 0)
EMBEDS = replace(MODEL, generates=False)
CLASSIFIES = replace(EMBEDS, classes=pb.Classes(labels=["a", "b"]))


def request(**sampling: object):
    submit = pb.Submit(request_id="a", prompt_ids=[5], sampling=pb.Sampling(**sampling))
    return to_request(submit, replace(MODEL, attention_modes=("window",)), FACTS)


def test_an_attention_that_the_worker_computes_reaches_the_engine() -> None:
    assert request(attention={"sinks": 64, "window": 4096}).sampling.attention == pb.Attention(sinks=64, window=4096)


def test_a_prediction_reaches_the_engine() -> None:
    submit = pb.Submit(request_id="a", prompt_ids=[5], prediction_ids=[7, 1999])
    assert to_request(submit, MODEL, FACTS).prediction_ids == [7, 1999]


def test_as_many_stop_tokens_as_the_api_allows() -> None:
    assert len(request(stop_token_ids=range(2, 1026)).sampling.stop_token_ids) == 1025


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"stop_token_ids": [3] * 1025}, "sampling.stop_token_ids: 1025 entries; at most 1024 are allowed"),
        (
            {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)},
            "sampling.logit_bias: 1025 entries; at most 1024 are allowed",
        ),
        ({"logit_bias": {3: float("inf")}}, "sampling.logit_bias: every bias must be finite"),
        ({"attention": {"sinks": 4}}, "sampling.attention: window must be at least 1, not 0"),
        ({"attention": {"pages": 3}}, "sampling.attention: pages must be 4 to 16777216, not 3"),
        ({"attention": {"pages": 9, "window": 7}}, "sampling.attention: pages exclude sinks and window"),
        (
            {"attention": {"pages": 9}},
            "sampling.attention: top_k(9) is not available: this worker computes dense, window",
        ),
        ({"grammar": "é" * MAX_GRAMMAR_BYTES}, f"sampling.grammar: at most {MAX_GRAMMAR_BYTES} bytes are allowed"),
    ],
)
def test_a_sampling_parameter_beyond_its_bounds_is_named(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        request(**sampling)
    assert f"{refused.value.field}: {refused.value}" == message


@pytest.mark.parametrize(
    ("model", "submit", "message"),
    [
        (EMBEDS, {}, "embed: this checkpoint has no output head: it embeds and cannot generate"),
        (CLASSIFIES, {}, "embed: this checkpoint has no output head: it classifies and cannot generate"),
        (MODEL, {"prediction_ids": [2000]}, "prediction_ids: token id 2000 is outside the vocabulary of 2000"),
        (MODEL, {"second_from": 1}, "second_from: 1 is not a position of the 1 prompt tokens"),
        (MODEL, {"embed": True, "generated_ids": [7]}, "generated_ids: must be empty when embed is set"),
        (
            MODEL,
            {"generated_ids": [7, 8], "sampling": pb.Sampling(max_tokens=2)},
            "sampling.max_tokens: 2 tokens are generated already",
        ),
    ],
)
def test_a_contradictory_request_is_rejected_by_its_field(model: Any, submit: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        to_request(pb.Submit(request_id="a", prompt_ids=[5], **submit), model, FACTS)
    assert f"{refused.value.field}: {refused.value}" == message


PIXELS = bytes(range(12))  # a frame with 2 x 2 pixels
SEES = replace(MODEL, images=pb.ImageInput(layout="idefics3", token=9, frame_tokens=3, frame_size=2))
SEES_ANY = replace(MODEL, images=pb.ImageInput(layout="qwen2_5_vl", token=9, frame_tokens=6, cell=2))
PICTURED = [5, 4, 9, 9, 9, 4, 6, 4, 9, 9, 9, 9, 9, 9, 4]  # two images, of one frame and of two


def image(first: int, tokens: int, n_frames: int, **changed: Any) -> pb.Image:
    frames = PIXELS * n_frames
    return pb.Image(**{"first": first, "tokens": tokens, "frames": frames, "digest": sha256(frames).digest()} | changed)


def test_images_reach_the_scheduler_with_the_places_of_their_frames() -> None:
    images = [image(1, 5, 1), image(7, 8, 2)]
    submit = pb.Submit(request_id="a", prompt_ids=PICTURED, images=images)
    accepted = to_request(submit, SEES, FACTS)
    assert [(frame.first, frame.end, frame.pixels) for frame in frames_of(accepted, SEES.images)] == [
        (2, 5, PIXELS),
        (8, 11, PIXELS),
        (11, 14, PIXELS),
    ]


def test_image_of_any_sides_reaches_the_scheduler_with_its_columns() -> None:
    digest = image_digest(PIXELS * 6, 3)
    submit = pb.Submit(request_id="a", prompt_ids=PICTURED, images=[image(7, 8, 6, columns=3, digest=digest)])
    (frame,) = frames_of(to_request(submit, SEES_ANY, FACTS), SEES_ANY.images)
    assert (frame.first, frame.end, frame.columns, frame.pixels) == (8, 14, 3, PIXELS * 6)


@pytest.mark.parametrize(
    ("model", "images", "named"),
    [
        (MODEL, [image(1, 5, 1)], "images: this worker reads text only"),
        (SEES, [image(1, 5, 1), image(5, 8, 2)], r"images\[1\].first: tokens 5 to 13 overlap another image"),
        (SEES, [image(7, 9, 2)], r"images\[0\].first: tokens 7 to 16 .* are not there"),
        (SEES, [image(1, 5, 0)], r"images\[0\].frames: 0 bytes are no frames of 2 x 2 pixels"),
        (SEES, [image(1, 5, 1, frames=b"12345")], r"images\[0\].frames: 5 bytes"),
        (SEES, [image(7, 8, 1)], r"images\[0\].tokens: 6 placeholders for frames of 3 rows"),
        (SEES, [image(1, 5, 1, digest=b"x")], r"images\[0\].digest: not the SHA-256"),
        (SEES, [image(1, 5, 1, columns=1)], r"images\[0\].columns: must be 0"),
        (SEES_ANY, [image(7, 8, 6)], r"images\[0\].columns: 0 columns for 6 cells"),
        (SEES_ANY, [image(7, 8, 6, columns=4)], r"images\[0\].columns: 4 columns for 6 cells"),
        (SEES_ANY, [image(7, 8, 7, columns=1)], r"images\[0\].frames: 84 bytes are no 1 to 6 cells of 2 x 2 pixels"),
        (SEES_ANY, [image(1, 5, 2, columns=2)], r"images\[0\].tokens: 3 placeholders for frames of 2 rows"),
        (SEES_ANY, [image(1, 14, 9, columns=3)], r"images\[0\].frames: 108 bytes"),
        (SEES_ANY, [image(2, 9, 6, columns=3)], r"images\[0\].tokens: placeholders of a frame that do not follow"),
        (SEES_ANY, [image(7, 8, 6, columns=3)], r"images\[0\].digest: not the SHA-256"),
    ],
)
def test_images_that_do_not_fit_are_refused_by_their_field(model: Any, images: list[pb.Image], named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        to_request(pb.Submit(request_id="a", prompt_ids=PICTURED, images=images), model, FACTS)
    assert re.match(named, f"{refused.value.field}: {refused.value}")


def test_embedded_text_has_no_images() -> None:
    submit = pb.Submit(request_id="a", prompt_ids=PICTURED, images=[image(1, 5, 1)], embed=True)
    with pytest.raises(InvalidRequestError, match="must be empty when embed is set"):
        to_request(submit, SEES, FACTS)
