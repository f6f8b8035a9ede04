"""Gemma 3 with its SigLIP tower; Llama 4, Mistral 3 and Qwen 3.5 as models of text alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from services.compute.model.families import gemma, llama4, mistral, qwen3_next
from services.compute.model.families.config import Config
from services.compute.model.families.naming import TEXT_PREFIXES, UNUSED, Family, Refs
from services.compute.model.families.siglip import read_siglip
from services.compute.model.files import image_settings
from services.compute.model.spec import ModelSpec
from services.compute.model.vision import VisionSpec

_LEFT_OUT = "the vision tower and its projector: this model reads text alone"
_TOWERS = ("vision_tower", "vision_model", "multi_modal_projector", "connector", "visual")
_VISION = tuple(f"{prefix}{module}.*" for prefix in ("", "model.") for module in _TOWERS)
# Settings of images and videos, and ids of tokens that stand for them.
_UNUSED_KEYS = (
    *("vision_config", "image_token_index", "image_token_id", "video_token_id", "vision_token_id", "boi_token_index"),
    *(
        "eoi_token_index",
        "boi_token_id",
        "eoi_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "mm_tokens_per_image",
        "spatial_merge_size",
    ),
    *(
        "boi_token_id",
        "eoi_token_id",
        "projector_hidden_act",
        "multimodal_projector_bias",
        "vision_feature_layer",
        "image_seq_length",
    ),
)
_OUTER_KEYS = ("model_type", "architectures", "tie_word_embeddings", "dtype", "torch_dtype")  # precede the text's
# Keys that the first configurations of Gemma 3 leave to the program's defaults.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
}


# The forms in which transformers 4 and 5 name Gemma 3's tower.
_GEMMA3_TOWER = (
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)


def multimodal_family(
    architecture: str,
    model_type: str,
    texts: Mapping[str, Family],
    prepare: Callable[[Config], None] = lambda _: None,
    vision: Callable[[Config], VisionSpec | None] = lambda _: None,
    prefixes: tuple[tuple[str, str], ...] = TEXT_PREFIXES,
) -> Family:
    """Return the family that reads `text_config` as one of `texts`, which are named by their `model_type` in it.

    `prepare` changes the configuration before; a config.json without a section is the text's, of the first kind.
    `vision` reads the tower for images; None: the vision is left out. `prefixes` of stored names.
    """

    def read_spec(config: Config) -> ModelSpec:
        tower = vision(config)
        outer = {key: config.raw(key) for key in _OUTER_KEYS}
        text = next(iter(texts.values()))
        if config.raw("text_config") is not None:
            config.enter("text_config")
            text = config.choice("model_type", texts, next(iter(texts)))
        for key, value in outer.items():
            if value is not None:
                config.override(key, value)
        config.pass_over(*_UNUSED_KEYS)
        prepare(config)
        spec = text.read_spec(config)
        if tower is not None and tower.image_token >= spec.vocab_size:
            raise config.error("image_token_id", f"expected an id below vocab_size {spec.vocab_size}")
        return replace(spec, left_out="" if tower else _LEFT_OUT, vision=tower)

    def refs(spec: ModelSpec) -> Refs:
        return next(text for text in texts.values() if text.model_type == spec.family).refs(spec)

    base = architecture.replace("ForConditionalGeneration", "Model")
    first = next(iter(texts.values()))
    return Family(
        architecture,
        model_type,
        read_spec,
        refs,
        (*UNUSED, *_VISION),
        stacked=first.stacked,
        prefixes=prefixes,
        base=base,
        spelling=first.spelling,
    )


def _gemma3(config: Config) -> None:
    for key, value in _GEMMA3_DEFAULTS.items():
        config.fill(key, value)
    config.override("final_logit_softcapping", None)  # transformers caps the logits of the text's class alone


def _gemma3_vision(config: Config) -> VisionSpec | None:
    """Read the tower; None for a folder that does not say how images are prepared: its users want texts alone."""
    if config.raw("vision_config") is None or image_settings(config.file.parent) is None:
        return None
    n_rows, tower = config.integer("mm_tokens_per_image", 256), config.section("vision_config")
    tower.pass_over("vision_use_head")
    side, patches = math.isqrt(n_rows), tower.integer("image_size", 224) // tower.integer("patch_size", 16)
    if side * side != n_rows or patches % side:
        raise config.error("mm_tokens_per_image", f"expected a square that divides {patches} x {patches} patches")
    return read_siglip(
        tower,
        hidden_size=768,
        n_heads=12,
        patch_size=16,
        layout="gemma3",
        image_token=config.integer(config.first_of("image_token_id", "image_token_index"), 262_144),
        square=patches // side,
        tower="vision_tower.",
        projection="multi_modal_projector.mm_input_projection_weight",
        mean_norm="multi_modal_projector.mm_soft_emb_norm.weight",
        sees_ahead=True,
    )


GEMMA3 = multimodal_family(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    {"gemma3_text": gemma.GEMMA3},
    _gemma3,
    _gemma3_vision,
    (*_GEMMA3_TOWER, *TEXT_PREFIXES),
)
LLAMA4 = multimodal_family("Llama4ForConditionalGeneration", "llama4", {"llama4_text": llama4.FAMILY})
MISTRAL3 = multimodal_family(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    {"mistral": mistral.FAMILY, "ministral3": mistral.MINISTRAL3},
)
QWEN3_5 = multimodal_family("Qwen3_5ForConditionalGeneration", "qwen3_5", {"qwen3_5_text": qwen3_next.QWEN3_5})
QWEN3_5_MOE = multimodal_family(
    "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", {"qwen3_5_moe_text": qwen3_next.QWEN3_5_MOE}
)
