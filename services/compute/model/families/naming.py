"""Names and places of a model's tensors in its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from services.compute.model.families.classifying import last_state
from services.compute.model.families.config import Config
from services.compute.model.spec import Classifier, ModelSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One logical tensor, [out, in] or [n]: a stored tensor, or rows of one that fuses projections.

    Concatenated projections: rows [start, start + size) of `n_stored`. Interleaved projections (gpt_neox, falcon): the
    stored rows are blocks of `n_parts` units of `unit` rows; this projection has `n_units` units of every block, from
    unit `part` on. Interleaved rope (glm): the two elements that are rotated together lie side by side in the first
    `n_paired` rows of a unit from row `first_paired` on; they are read in rotate-half order, which leaves every product
    of q and k the same. Tiled heads (llama.cpp's Qwen 3.5): of each of `n_groups` groups of units the first one is
    stored, then of each the second one; `tiled_columns` are stored so in units of so many columns.
    """

    name: str
    transposed: bool = False  # stored [in, out], unless it is quantized
    start: int = 0
    n_stored: int | None = None
    unit: int = 0
    part: int = 0
    n_units: int = 1
    n_parts: int = 1
    n_paired: int = 0
    first_paired: int = 0
    n_groups: int = 1
    group: int = 1  # units of a group; 1: they are in order
    tiled_columns: int = 0
    filtered: bool = False  # stored [out, 1, in]: a filter for each channel
    place: int | None = None  # in a stack [n_stacked, out, in] of matrices
    n_stacked: int = 0
    folded: int = 0  # a vector is stored as rows of so many numbers; 0: as one
    flat: bool = False  # a matrix of one row is stored as a vector
    boxed: bool = False  # a vector is stored [1, 1, n, 1]
    exponential: bool = False  # stored as -exp(x)


Refs = dict[str, TensorRef]


def stored_size(ref: TensorRef, size: int) -> int:
    """Return the stored output size of a tensor whose logical part has `size` rows."""
    return size * ref.n_parts // ref.n_units if ref.n_stored is None else ref.n_stored


# Patterns of stored tensors that are not needed here: tables that are computed, the value head of reinforcement
# learning, scales of another program's KV cache, layers that only draft tokens.
UNUSED = (
    *("*rotary_emb.inv_freq", "*rotary_emb.cos_cached", "*rotary_emb.sin_cached", "*.rotary_emb.original_inv_freq"),
    *("v_head.*", "*.v_head.*"),
    *("*.k_scale", "*.v_scale", "*.q_scale", "*.prob_scale", "*.k_proj.output_scale", "*.v_proj.output_scale"),
    *("mtp.*", "model.mtp.*", "mtp_layers.*", "model.mtp_layers.*"),
)


# The forms in which transformers 4 and 5 name a text's model inside of a model of images and text, and in which that
# model's references have them.
TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)


def renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """Return a name with its prefix replaced by the first pair that fits, of prefixes and what stands for them."""
    old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
    return new + name.removeprefix(old)


@dataclass(frozen=True, slots=True)
class StackedNames:
    """The modules of a layer whose experts are one tensor, as transformers 5 computes them."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    dense: str = ""  # a layer without experts has its MLP there; "": where `refs` say


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: reads its config.json and names its tensors."""

    architecture: str
    model_type: str
    read_spec: Callable[[Config], ModelSpec]
    refs: Callable[[ModelSpec], Refs]
    ignored: tuple[str, ...] = UNUSED  # patterns of stored tensors that are not read
    optional_prefix: str = "model."  # prefix of names; absent if only the body of a model was stored
    stacked: StackedNames | None = StackedNames()  # None: `refs` names them
    prefixes: tuple[tuple[str, str], ...] = ()  # prefixes of stored names, with their replacements in `refs`
    aliases: tuple[str, ...] = ()  # other names of the architecture
    base: str = ""  # exceptional name of the architecture without its head
    spelling: Mapping[str, str] = field(default_factory=dict)  # keys of config.json, by Llama's name for them
    classifying: str = ""  # exceptional name of the architecture with a head for labels
    classifier: Callable[[Config, ModelSpec], Classifier] = last_state

    @property
    def base_architecture(self) -> str:
        """The name of the architecture without its head, which only embeds."""
        return self.base or self.architecture.replace("ForCausalLM", "Model")

    @property
    def classifying_architecture(self) -> str:
        """The name of the architecture with a head for labels; empty if there is none."""
        if self.classifying:
            return self.classifying
        body = self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        return "" if body == self.architecture else f"{body}ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The layer's modules in the checkpoint, for `standard_refs`; "" for absent modules."""

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    attn_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attn_post_norm: str = ""
    mlp_post_norm: str = ""
    router: str = "mlp.gate"
    router_correction: str = "mlp.gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    experts: str = "mlp.experts"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"


STANDARD = LayerNames()


def standard_refs(
    spec: ModelSpec,
    names: LayerNames = STANDARD,
    *,
    prefix: str = "model.layers.",
    embed: str = "model.embed_tokens",
    embed_norm: str = "",
    norm: str = "model.norm",
    head: str = "lm_head",
) -> Refs:
    """Return the references of a model with the structure of transformers' Llama and the given module names."""
    refs = {"embed": TensorRef(f"{embed}.weight")}
    refs["head"] = refs["embed"] if spec.tied else TensorRef(f"{head}.weight")
    if spec.head_bias:
        refs["head.bias"] = TensorRef(f"{head}.bias")
    if spec.final_norm:
        refs |= _norm_refs(spec, "norm", norm)
    if spec.embed_norm:
        refs |= _norm_refs(spec, "embed_norm", embed_norm)
    for index in range(spec.n_layers):
        refs |= _layer_refs(spec, index, f"layers.{index}.", f"{prefix}{index}.", names)
    return refs


def classifier_refs(spec: ModelSpec, classifier: Classifier) -> Refs:
    """Return the references of a classifier's layers, by their numbers."""
    refs: Refs = {}
    for index, layer in enumerate(classifier.layers):
        refs |= linear_refs(f"classifier{index}", layer.module, layer.bias)
        if layer.norm:
            refs |= _norm_refs(spec, f"classifier{index}_norm", layer.norm)
    return refs


def _norm_refs(spec: ModelSpec, key: str, module: str) -> Refs:
    refs = {key: TensorRef(f"{module}.weight")}
    if spec.norm_bias:
        refs[f"{key}.bias"] = TensorRef(f"{module}.bias")
    return refs


def linear_refs(key: str, module: str, bias: bool) -> Refs:
    """Return the references of a product and of its bias, if it has one."""
    refs = {key: TensorRef(f"{module}.weight")}
    if bias:
        refs[f"{key}.bias"] = TensorRef(f"{module}.bias")
    return refs


def _layer_refs(spec: ModelSpec, index: int, key: str, module: str, names: LayerNames) -> Refs:
    layer, refs = spec.layers[index], Refs()
    if layer.attends:
        refs |= _attention_refs(spec, key, module, names)
    norms = ["attn_norm", "mlp_norm"] * spec.pre_norm + ["attn_post_norm", "mlp_post_norm"] * spec.post_norm
    if spec.shared_norm:
        norms.remove("mlp_norm")
    there = {"attn": layer.attends or layer.mixer is not None, "mlp": layer.has_mlp}
    for norm in norms:
        if there[norm.partition("_")[0]]:
            refs |= _norm_refs(spec, key + norm, module + getattr(names, norm))
    moe, parts = layer.moe, ("gate", "up", "down") if spec.mlp == "gated" else ("up", "down")
    if not layer.has_mlp:
        return refs
    if moe is None:
        for part in parts:
            refs |= linear_refs(key + part, module + getattr(names, part), spec.mlp_bias)
        return refs
    return refs | _moe_refs(moe, key, module, names, parts)


def _attention_refs(spec: ModelSpec, key: str, module: str, names: LayerNames) -> Refs:
    refs: Refs = {}
    for part in ("q", "k", "v"):
        refs |= linear_refs(key + part, module + getattr(names, part), spec.qkv_bias)
    refs |= linear_refs(f"{key}o", module + names.o, spec.o_bias)
    if spec.qk_norm in ("head", "full"):
        refs[f"{key}q_norm"] = TensorRef(f"{module}{names.q_norm}.weight")
        refs[f"{key}k_norm"] = TensorRef(f"{module}{names.k_norm}.weight")
    return refs


def _moe_refs(moe: MoeSpec, key: str, module: str, names: LayerNames, parts: tuple[str, ...]) -> Refs:
    refs = {f"{key}router": TensorRef(f"{module}{names.router}.weight")}
    if moe.routing.corrected:
        refs[f"{key}router_correction"] = TensorRef(module + names.router_correction)
    if moe.shared_gate:
        refs[f"{key}shared_gate"] = TensorRef(f"{module}{names.shared_gate}.weight")
    experts = {f"{key}experts.{number}": f"{module}{names.experts}.{number}" for number in range(moe.n_experts)}
    if moe.shared_size:
        experts[f"{key}shared"] = module + names.shared
    for expert, stored in experts.items():
        for part in parts:
            refs[f"{expert}.{part}"] = TensorRef(f"{stored}.{getattr(names, f'expert_{part}')}.weight")
    return refs
