"""SmolVLM and Idefics 3: Llama, with a SigLIP tower and a pixel shuffle for images."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families import llama
from services.compute.model.families.config import Config
from services.compute.model.families.multimodal import multimodal_family
from services.compute.model.families.naming import Family
from services.compute.model.families.siglip import read_siglip
from services.compute.model.spec import ModelSpec
from services.compute.model.vision import VisionSpec

_TEXTS = {"llama": llama.FAMILY}
_PREFIXES = (("model.text_model.", "model."),)
# Settings of training and of parts that these models do not have.
_UNUSED = ("perceiver_config", "pixel_shuffle_factor", "qk_layer_norms", "use_resampler", "use_reentrant_checkpointing")
# The tower's settings for the program that prepares images; preprocessor_config.json has those in force.
_UNUSED_BY_TOWER = ("max_image_size", "size", "tie_word_embeddings", "use_base_siglip")


def _vision(config: Config) -> VisionSpec:
    """Read the tower. Raises ModelError."""
    tower = config.section("vision_config")
    tower.pass_over(*_UNUSED_BY_TOWER)
    return read_siglip(
        tower,
        hidden_size=1152,
        n_heads=16,
        patch_size=32,
        layout="idefics3",
        image_token=config.integer("image_token_id", 128_257),
        square=config.integer("scale_factor", 2),
        bucketed=True,
        tower="model.vision_model.",
        projection="model.connector.modality_projection.proj.weight",
    )


def _family(architecture: str, model_type: str) -> Family:
    family = multimodal_family(
        architecture, model_type, _TEXTS, lambda config: config.pass_over(*_UNUSED), _vision, _PREFIXES
    )

    def read_spec(config: Config) -> ModelSpec:  # this file's first line describes the family
        return family.read_spec(config)

    return replace(family, read_spec=read_spec)


SMOLVLM = _family("SmolVLMForConditionalGeneration", "smolvlm")
IDEFICS3 = _family("Idefics3ForConditionalGeneration", "idefics3")
