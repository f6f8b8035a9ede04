"""Describes a decoder-only model by orthogonal switches. Free of torch, because the server process also uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.compute.backends.names import Activation
from services.compute.backends.shapes import ExpertRouting, StateFormat
from services.compute.model.layout import Layout
from services.compute.model.mixers import Mixer
from services.compute.model.vision import VisionSpec
from services.compute.ranks.config import PoolingKind

HeadActivation = Literal["identity", "tanh", "gelu", "relu", "silu"]
LabelFunction = Literal["softmax", "sigmoid", "identity"]


class ModelError(ValueError):
    """A checkpoint that this code cannot serve correctly; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding over the first `rotary_dim` elements of a head, in rotate-half layout."""

    theta: float
    rotary_dim: int
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: cos and sin are multiplied by it
    long_attention_factor: float | None = None  # longrope: in its place with the long factors; None: the same
    short_factors: tuple[float, ...] = ()  # longrope, [rotary_dim / 2]
    long_factors: tuple[float, ...] = ()  # longrope, [rotary_dim / 2]
    # The position of each pair: a row's time (0), its line (1) or column (2) in an image (M-RoPE, arXiv:2409.12191);
    # (): all by the position.
    axes: tuple[int, ...] = ()

    def serves_long(self, max_positions: int) -> bool:
        """Whether LongRoPE needs the long factors for sequences of up to `max_positions`.

        The answer is fixed for a deployment, because a switch during a request would invalidate its cached keys.
        """
        return max_positions > self.original_max_positions


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of gated experts, and experts shared by all rows as one MLP."""

    n_experts: int
    ffn_size: int
    routing: ExpertRouting
    shared_size: int = 0  # columns of the shared expert; 0: none
    shared_gate: bool = False  # its results are multiplied by the sigmoid of a product with the row
    bias: bool = False  # biases of the router and the experts


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek 2, arXiv:2405.04434): the heads' keys and values are products of a latent.

    The cache holds the latent and one rotated key for all heads: `n_kv_heads` of the model is 1, its `head_dim` is
    `rope_dim + rank`. A query's part without a rope is multiplied by the key's matrix first, the result of attention
    by the value's matrix afterwards, which is the same as attention over the heads' own keys and values.
    """

    rank: int  # numbers of the latent
    query_rank: int  # numbers of the queries' latent; 0: queries are products of the row
    nope_dim: int  # numbers of a head's query and key without a rope
    rope_dim: int  # numbers with a rope
    value_dim: int  # numbers of a head's value

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Numbers of a head's key without the rope, and of its value."""
        return self.nope_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries are multiplied by 1 + beta * ln(1 + floor((position + first) / period))."""

    beta: float
    period: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class SumFactors:
    """The residual stream after a part of a layer is alpha * residual + beta * result."""

    alpha: float = 1.0
    beta: float = 1.0


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys a row sees; layers with the same reach share a plan."""

    window: int | None
    chunk: int | None


@dataclass(frozen=True, slots=True)
class IntegerPart:
    """The part of some matrices that is stored as integers, which a device may keep as they are."""

    share: float  # share of these matrices' elements
    element_bytes: float  # mean bytes of an element in memory, its share of the scales included


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Attention and an MLP, without residuals, over a row and its embedding; layers share it (arXiv:2411.15242).

    The layer's mixer reads the residual plus a product of the block's results.
    """

    number: int  # blocks of the same number have the same weights
    rank: int  # rank of the product that a layer adds to the MLP's gate and up
    attention_rank: int  # likewise for q, k and v; 0: none


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Settings that may differ between the layers of a model."""

    window: int | None = None  # number of keys that a row sees on a side, including its own; None: all
    rope: RopeSpec | None = None
    moe: MoeSpec | None = None
    chunk: int | None = None  # a row sees the keys from the last multiple of it on; None: all
    query_scale: QueryScale | None = None
    attends: bool = True
    mixer: Mixer | None = None  # a mixer with a state, next to attention or in its place
    has_mlp: bool = True
    mixing_sum: SumFactors = SumFactors()  # after attention and the mixer
    mlp_sum: SumFactors = SumFactors()
    block: SharedBlock | None = None  # attention and MLP are those of a block

    @property
    def reach(self) -> Reach:
        """Which keys a row sees."""
        return Reach(self.window, self.chunk)


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer over a pooled state: a product, an activation, and a layer norm if it has one."""

    module: str  # stored name of the product
    n_out: int
    bias: bool = True
    activation: HeadActivation = "identity"
    norm: str = ""  # stored name of the norm, which has a bias if those of the layers have one


@dataclass(frozen=True, slots=True)
class Classifier:
    """A head that turns a pooled state into one number for each label."""

    pooling: PoolingKind
    layers: tuple[HeadLayer, ...]  # in order; the last one has as many outputs as there are labels
    labels: tuple[str, ...]
    function: LabelFunction  # the publisher's, that makes scores of the numbers


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Every switch of a transformer that this worker implements."""

    family: str
    dtype: str  # dtype of the checkpoint's weights: "float32", "bfloat16", "float16"
    vocab_size: int
    hidden_size: int
    ffn_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    layers: tuple[LayerSpec, ...]

    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # added to a norm's weight (gemma: 1)
    bidirectional: bool = False  # a row also sees later keys; nothing is cached
    pre_norm: bool = True  # normalise the inputs of attention and MLP
    post_norm: bool = False  # normalise their outputs
    sum_norm: bool = False  # the post norms normalise the residual after the addition (the first transformers)
    final_norm: bool = True  # normalise what the last layer returns
    parallel_residual: bool = False  # attention and MLP read the same residual
    shared_norm: bool = False  # the MLP reads the norm of attention; parallel residual only
    embed_norm: bool = False  # normalise the embeddings
    # RMS norm of q and k, per head or over all heads; "unit": per head, without weights, in layers with a rope.
    qk_norm: Literal["head", "full", "unit"] | None = None
    qk_norm_rotated: bool = False  # after the rope
    sub_norm: bool = False  # RMS norm of the inputs of the projections `o` and `down`
    latent: LatentSpec | None = None
    attention_gate: bool = False  # results of attention are multiplied by the sigmoid of a product with the row
    sinks: bool = False  # every head has a stored score of one more key, whose value is 0
    learned_positions: bool = False
    n_token_types: int = 0  # learned embeddings of a token's text: the first or the second of two
    alibi: bool = False  # scores have a linear bias over the distance (ALiBi, arXiv:2108.12409)

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    head_bias: bool = False

    mlp: Literal["gated", "plain"] = "gated"
    activation: Activation = "silu"
    tied: bool = False  # the head is the embedding, unless the checkpoint stores a head
    left_out: str = ""  # parts of the checkpoint that are not loaded, for people
    generates: bool = True  # False: the checkpoint is the body of a model, without a head
    classifier: Classifier | None = None
    vision: VisionSpec | None = None  # None: texts alone

    attention_scale: float = 0.0  # factor of q·k
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_factor: float = 1.0  # multiplies attention's results in a layer with a mixer
    mixer_factor: float = 1.0  # multiplies the mixer's results in a layer with attention
    gate_factor: float = 1.0  # multiplies the MLP's gate before its activation
    down_factor: float = 1.0  # multiplies the MLP's results

    eos_token_ids: tuple[int, ...] = ()
    quantization: tuple[Layout, ...] = ()  # layouts of the quantized linear layers; (): not quantized
    in_layers: IntegerPart | None = None  # integers in a GGUF file's layers
    in_tables: IntegerPart | None = None  # integers in a GGUF file's embedding and head

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The distinct ropes, in the order of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def query_scales(self) -> tuple[QueryScale, ...]:
        """The distinct scales of queries, in the order of the layers."""
        return tuple(dict.fromkeys(layer.query_scale for layer in self.layers if layer.query_scale is not None))

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """The distinct reaches of attention, in the order of the layers."""
        return tuple(dict.fromkeys(layer.reach for layer in self.layers if layer.attends))

    @property
    def n_attending(self) -> int:
        """Number of layers with attention, which alone have keys and values."""
        return sum(layer.attends for layer in self.layers)

    @property
    def n_blocks(self) -> int:
        """Number of blocks that layers share."""
        return len({layer.block.number for layer in self.layers if layer.block is not None})

    @property
    def unshared(self) -> tuple[LayerSpec, ...]:
        """The layers with weights of their own: of those that share a block only the first."""
        firsts = {layer.block.number: index for index, layer in reversed([*enumerate(self.layers)]) if layer.block}
        return tuple(layer for i, layer in enumerate(self.layers) if not layer.block or firsts[layer.block.number] == i)

    @property
    def attention_width(self) -> int:
        """Numbers of a row that queries, keys and values are products of."""
        return self.hidden_size * (2 if self.n_blocks else 1)

    @property
    def has_state(self) -> bool:
        """Whether layers keep a state outside the KV cache."""
        return any(layer.mixer is not None for layer in self.layers)

    def state(self, ranks: int) -> StateFormat:
        """Return the state of a sequence on each of `ranks` ranks."""
        return StateFormat(tuple(() if layer.mixer is None else layer.mixer.parts(ranks) for layer in self.layers))

    @property
    def alibi_slopes(self) -> tuple[float, ...]:
        """The slope of every head's linear bias; () without ALiBi.

        Of 2^k heads, head i has 2^(-8 * (i + 1) / 2^k). More heads take every second slope of twice as many.
        """
        if not self.alibi:
            return ()
        n = 1 << (self.n_heads.bit_length() - 1)  # the largest power of two that is not above n_heads
        exponents = [*((index + 1) / n for index in range(n)), *((index + 0.5) / n for index in range(n))]
        return tuple(2.0 ** (-8 * exponent) for exponent in exponents[: self.n_heads])

    def rope_choice(self, max_positions: int) -> str:
        """Name LongRoPE's choice of factors, which depends on served lengths and changes all keys; otherwise ""."""
        kinds = {
            "long" if rope.serves_long(max_positions) else "short"
            for rope in (layer.rope for layer in self.layers)
            if rope is not None and rope.kind == "longrope"
        }
        return "".join(sorted(kinds))

    def kv_heads_per_rank(self, size: int) -> int:
        """Number of KV heads on each of `size` ranks: a share of them, or one head that several ranks hold.

        Raises ModelError, which names the numbers of ranks that work, when `size` ranks cannot divide the model.
        """
        if whole := self._indivisible(size):
            *others, last = [str(count) for count in self.rank_counts()]
            work = f"{', '.join(others)} or {last} ranks work" if others else "only 1 rank works"
            raise ModelError(f"{whole} cannot be divided among {size} ranks: {work}")
        return max(1, self.n_kv_heads // size)

    def rank_counts(self) -> tuple[int, ...]:
        """The numbers of ranks that can divide the model."""
        most = max(count for _, count in self.divided) if self.has_state else self.n_heads
        return tuple(size for size in range(1, most + 1) if not self._indivisible(size))

    @property
    def divided(self) -> tuple[tuple[str, int], ...]:
        """The parts that ranks divide among themselves, and their numbers."""
        parts = [("attention heads", self.n_heads), ("KV heads", self.n_kv_heads)] if self.n_attending else []
        for layer in self.layers:
            if layer.mixer is not None:
                parts += layer.mixer.divided
            if not layer.has_mlp:
                continue
            if layer.moe is None:
                parts.append(("MLP columns", self.ffn_size))
            else:
                parts += [("experts", layer.moe.n_experts), ("columns of the shared expert", layer.moe.shared_size)]
        return tuple((what, count) for what, count in dict.fromkeys(parts) if count)

    def _indivisible(self, size: int) -> str:
        """Return the parts that `size` ranks cannot divide; "" for none."""
        for what, count in self.divided:
            shared = what == "KV heads" and size % count == 0  # several ranks hold one head
            if count % size and not shared:
                return f"{count} {what}"
        return ""
