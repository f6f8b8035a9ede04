"""Describes the features of a model besides a plain stack of layers."""

from __future__ import annotations

from services.compute.model.spec import ModelSpec


def features(spec: ModelSpec) -> tuple[str, ...]:
    """Return the parts of a model that cost memory or time in another way than a plain decoder's, or none of it."""
    layers = spec.layers
    mixtures = [layer.moe for layer in layers if layer.moe is not None]
    scaled = {rope.kind for rope in spec.ropes} - {"default"}
    present = {
        "no KV cache": spec.bidirectional,
        "state": spec.has_state,
        "shared blocks": spec.n_blocks > 0,
        "latent attention": spec.latent is not None,
        "sliding window": any(layer.window is not None for layer in layers),
        "attention in chunks": any(layer.chunk is not None for layer in layers),
        "attention sinks": spec.sinks,
        "experts": bool(mixtures),
        "shared experts": any(mixture.shared_size for mixture in mixtures),
        "learned positions": spec.learned_positions,
        "ALiBi": spec.alibi,
        "layers without a rope": bool(spec.ropes) and any(layer.attends and layer.rope is None for layer in layers),
        **{f"{kind} rope": True for kind in sorted(scaled)},
        "softcaps": spec.attention_softcap is not None or spec.logit_softcap is not None,
        "images": spec.vision is not None,
        "vision left out": bool(spec.left_out),
    }
    return tuple(name for name, there in present.items() if there)
