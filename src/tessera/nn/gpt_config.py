"""`GPTConfig`: the sizes and architecture choices of a GPT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ..core.checks import axes_of, shown, unfit, unread, whole
from ..core.declared import (
    Count,
    Flag,
    Given,
    Integer,
    Listed,
    Natural,
    OneOf,
    Probability,
    Rate,
    Real,
    Scale,
    String,
)
from ..core.errors import UsageError
from . import functional as fn
from .experts.layer import RATE
from .flash import Implementation
from .layers import LayerNorm, RMSNorm
from .positions import Rope

NORMS = ("layer", "rms", "rms_offset")
ACTIVATIONS = {
    "gelu": fn.gelu, "gelu_exact": lambda x: fn.gelu(x, "none"), "relu": fn.relu, "silu": fn.silu,
    "swiglu": fn.silu, "geglu": fn.gelu,
}  # fmt: skip
GATED = ("swiglu", "geglu")
POSITIONS = ("learned", "rotary", "alibi")
BLOCKS = ("sequential", "parallel", "parallel_norms", "post_norms")
BIASES = ("qkv", "out", "mlp", "head")
CONTEXTS = ("ring", "all_to_all")
EXPERTS = (
    "experts_per_token", "capacity", "aux_weight", "router", "shared_experts", "normalize_gates",
    "gate_scale", "expert_groups", "topk_groups", "balance", "balance_rate",
)  # fmt: skip

RopeGiven = Annotated[Rope, Given("give nn.Rope(base=...)")]
REMAT = ("save", "recompute", "products", "offload")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a `GPT`.

    - `kv_heads`: number of heads of keys and values; None: `heads`. `head_size`: None is d/heads.
    - `tied`: the output layer uses the embedding's weights.
    - `norm`: "layer", "rms", or "rms_offset", which multiplies by 1 + its weight (Gemma).
    - `activation`: "gelu" (by tanh), "gelu_exact", "relu", "silu", or one with a gate: "swiglu", or
      "geglu" (by tanh).
    - `positions`: "learned", "rotary" (rates from `rope`) or "alibi".
    - `block`: "sequential": the MLP follows attention. "parallel": both take the same norm of the
      block's input (Wang & Komatsuzaki 2021). "parallel_norms": each has its own norm.
      "post_norms": sequential, with a further norm of each sublayer's result (Gemma 2).
    - `qk_norm`: queries and keys are normalized, each head by itself.
    - `query_scale`: the factor of attention's scores; None: 1/sqrt(the size of a head).
    - `attention_cap`, `logit_cap`: scores and logits become `cap * tanh(x / cap)`; None: no cap.
    - `windows`: the windows of the layers, repeated over all layers: a token sees itself and the
      window - 1 tokens before it; 0: all. `local_rope` are the rates of layers with a window, None:
      those of `rope`.
    - `embed_scale`: embeddings are multiplied by sqrt(d).
    - `attention_implementation`: "tiles" or "sequences", as in `flash_attention`; None: "tiles".
    - `biases`: the products with a bias: "qkv", "out", "mlp", "head".
    - `context`: "ring" or "all_to_all" splits the sequence over mesh axis `context_axis` from the
      embedding to the loss. Attention is then `ring_attention`, with the sequence in zig-zag order,
      or `all_to_all_attention`.
    - `sequence_parallel`: the mesh axis over which tensor parallelism splits the sequence for ops
      that act on each row separately.
    - `experts`: the MLP of each block is an `nn.MoE` of this many experts, `experts_per_token` of
      them per token, with room for `capacity` times an even share (None: for all tokens). `loss`
      adds `aux_weight` times the mean of their auxiliary losses. `router`, `shared_experts`,
      `normalize_gates`, `gate_scale`, `expert_groups`, `topk_groups`, `balance` and `balance_rate`
      are `router`, `shared`, `normalize`, `scale`, `expert_groups`, `topk_groups`, `balance` and
      `rate` of `nn.MoE`. With `balance="bias"` each call in training moves the layers' biases.
    - `remat`, `loop`, `stacked`: as in `Stack`. `stacked=False` gives each layer separate weights,
      which a pipeline needs.

    Raises UsageError if a choice is unknown, `d`, `heads` and `kv_heads` do not divide, or a choice
    has no effect beside the others.
    """

    vocab: Count = 1024
    seq: Count = 256
    d: Count = 256
    layers: Count = 4
    heads: Count = 8
    kv_heads: Count | None = None
    hidden: Count | None = None
    norm: Annotated[str, OneOf(*NORMS)] = "layer"
    activation: Annotated[str, OneOf(*ACTIVATIONS)] = "gelu"
    positions: Annotated[str, OneOf(*POSITIONS)] = "learned"
    tied: Flag = False
    dropout: Probability = 0.0
    loop: Flag | None = None
    remat: bool | str | int = False
    head_size: Count | None = None
    norm_eps: Real | None = None
    rope: RopeGiven = field(default_factory=Rope)
    block: Annotated[str, OneOf(*BLOCKS)] = "sequential"
    biases: tuple[str, ...] = ()
    context: Annotated[str, OneOf(*CONTEXTS)] | None = None
    context_axis: String = "cp"
    sequence_parallel: String | None = None
    experts: Natural = 0
    experts_per_token: Count = 2
    capacity: Real | None = 1.25
    aux_weight: Rate = 0.01
    router: String = "topk"
    shared_experts: Integer = 0
    normalize_gates: Flag | None = None
    gate_scale: Real = 1.0
    expert_groups: Integer | None = None
    topk_groups: Integer | None = None
    balance: Annotated[str, OneOf("bias")] | None = None
    balance_rate: Real = RATE
    stacked: Flag = True
    qk_norm: Flag = False
    query_scale: Scale | None = None
    attention_cap: Scale | None = None
    logit_cap: Scale | None = None
    windows: Annotated[tuple[int, ...], Listed()] = ()
    local_rope: RopeGiven | None = None
    embed_scale: Flag = False
    attention_implementation: Implementation | None = None

    def __post_init__(self) -> None:
        for window in self.windows:
            whole("GPTConfig", "a window", window, 0)
        if not isinstance(self.biases, tuple) or not set(map(str, self.biases)) <= set(BIASES):
            raise unfit("GPTConfig", "biases", self.biases, "give a tuple of " + ", ".join(BIASES))
        known = REMAT if isinstance(self.remat, str) else range(self.layers + 1)
        if not isinstance(self.remat, (str, int)) or self.remat not in known:
            fix = f"give True, False, {', '.join(REMAT)}, or a number of layers"
            raise unfit("GPTConfig", "remat", self.remat, fix)
        self._check_together()
        groups = self.kv_heads or self.heads
        if (self.head_size is None and self.d % self.heads) or self.heads % groups:
            raise UsageError(
                f"GPTConfig: d={self.d}, heads={self.heads}, kv_heads={groups} do not divide",
                fix="heads divides d, kv_heads divides heads",
            )
        for axis in (self.context_axis, self.sequence_parallel):
            if axis is not None and len(axes_of("GPTConfig", axis)) != 1:
                raise UsageError(
                    f"GPTConfig: {shown(axis)} is not one axis",
                    fix='name one axis of the mesh, e.g. "cp"',
                )

    def _check_together(self) -> None:
        """Raises UsageError for choices that exclude each other, or that have no effect."""
        for read, of, why, fix in (
            (self.positions == "rotary", ("rope", "local_rope"),
             f'positions are "{self.positions}"', 'give positions="rotary"'),
            (self.experts, EXPERTS, "no layer has experts", "give experts=8"),
            (self.balance, ("balance_rate",), "no bias balances the load", 'give balance="bias"'),
            (self.context, ("context_axis",), "the sequence is not split",
             'give context="ring" or "all_to_all"'),
            (not self.experts or "mlp" not in self.biases, ("biases",),
             "experts have no biases", 'leave out "mlp"'),
        ):  # fmt: skip
            if not read:
                unread("GPTConfig", self, of, why, fix)
        local = any(self.windows)
        for wrong, message, fix in (
            (
                self.attention_cap and self.context,
                "attention_cap with context",
                "leave one of them",
            ),
            (
                self.attention_implementation and self.context,
                "attention_implementation with context",
                "leave one of them",
            ),
            (local and self.positions == "alibi", "windows with ALiBi", 'use positions="rotary"'),
            (self.local_rope and not local, "local_rope without windows", "give windows=(...)"),
            (
                self.local_rope and self.local_rope.partial != self.rope.partial,
                "local_rope with another part of a head than rope",
                "give both the same partial",
            ),
        ):
            if wrong:
                raise UsageError(f"GPTConfig: {message} is not supported", fix=fix)

    @property
    def size(self) -> int:
        """The size of one head."""
        return self.head_size or self.d // self.heads

    @property
    def groups(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """The size of the hidden layer of the MLP."""
        return self.hidden or (8 * self.d // 3 if self.gated else 4 * self.d)

    @property
    def gated(self) -> bool:
        """Returns whether the MLP has a gate."""
        return self.activation in GATED

    @property
    def layer_windows(self) -> list[int]:
        """The window of each layer, 0 for no window; empty if no layer has one."""
        if not any(self.windows):
            return []
        return [self.windows[i % len(self.windows)] for i in range(self.layers)]

    def make_norm(self, size: int | None = None) -> LayerNorm | RMSNorm:
        """A new norm layer of `size` (None: `d`), of the kind and with the eps of this config."""
        more = {} if self.norm_eps is None else {"eps": self.norm_eps}
        if self.norm == "layer":
            return LayerNorm(size or self.d, **more)
        return RMSNorm(size or self.d, offset=self.norm == "rms_offset", **more)


Config = Annotated[
    GPTConfig, Given("give nn.GPTConfig(vocab=..., seq=..., d=..., layers=..., heads=...)")
]
