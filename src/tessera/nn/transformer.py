"""A GPT: decoder-only transformer with the choices that today's models make.

One class is GPT-2, Llama, Mistral, Qwen2 and Falcon: they differ in `GPTConfig` only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..core.checks import (
    axes_of,
    divides,
    instance,
    number,
    one_of,
    probability,
    shown,
    unfit,
    whole,
)
from ..core.errors import ShapeError, UsageError, fail
from ..core.layout import dim_axes
from ..lang import functions as F
from ..lang.checks import annotated_fields
from ..lang.operands import as_tensor
from ..lang.parameter import Parameter
from ..lang.tensor import Tensor
from . import functional as fn
from .context_parallel import (
    all_to_all_attention,
    axis_size,
    ring_attention,
    split_sequence,
    unzigzag,
    whole_sequence,
    zigzag,
    zigzag_positions,
)
from .experts.layer import MoE
from .layers import Embedding, LayerNorm, RMSNorm, normal
from .losses import linear_cross_entropy
from .module import Module
from .positions import Rope, alibi_bias
from .stack import Stack

NORMS = ("layer", "rms")
ACTIVATIONS = {
    "gelu": fn.gelu, "gelu_exact": lambda x: fn.gelu(x, "none"), "relu": fn.relu, "silu": fn.silu,
    "swiglu": fn.silu,
}  # fmt: skip
POSITIONS = ("learned", "rotary", "alibi")
BLOCKS = ("sequential", "parallel", "parallel_norms")
BIASES = ("qkv", "out", "mlp")
CONTEXTS = ("ring", "all_to_all")

REMAT = ("save", "recompute", "products")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a `GPT`.

    - `kv_heads`: heads of keys and values; None: `heads`. `head_size`: None is d/heads.
    - `tied`: the output layer uses the embedding's weights.
    - `norm`: "layer" or "rms".
    - `activation`: "gelu" (by tanh), "gelu_exact", "relu", "silu", or "swiglu", which has a gate.
    - `positions`: "learned", "rotary" (rates from `rope`) or "alibi".
    - `block`: "sequential": the MLP follows attention. "parallel": both take the same norm of the
      block's input (Wang & Komatsuzaki 2021). "parallel_norms": a norm for each.
    - `biases`: which products have a bias: "qkv", "out", "mlp".
    - `context`: "ring" or "all_to_all" splits the sequence over mesh axis `context_axis` from the
      embedding to the loss. Attention is then `ring_attention`, with the sequence in zig-zag order,
      or `all_to_all_attention`.
    - `sequence_parallel`: the mesh axis over which tensor parallelism splits the sequence where ops
      act on each row separately.
    - `experts`: the MLP of each block is an `nn.MoE` of this many experts, `experts_per_token` of
      them per token, with room for `capacity` times an even share (None: for all tokens). `loss`
      adds `aux_weight` times the mean of their auxiliary losses.
    - `remat`, `loop`, `stacked`: as in `Stack`. `stacked=False` gives each layer weights of its
      own, which a pipeline needs.

    Raises UsageError if a choice is unknown, or `d`, `heads` and `kv_heads` do not divide.
    """

    vocab: int = 1024
    seq: int = 256
    d: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int | None = None
    hidden: int | None = None
    norm: str = "layer"
    activation: str = "gelu"
    positions: str = "learned"
    tied: bool = False
    dropout: float = 0.0
    loop: bool | None = None
    remat: bool | str = False
    head_size: int | None = None
    norm_eps: float | None = None
    rope: Rope = field(default_factory=Rope)
    block: str = "sequential"
    biases: tuple[str, ...] = ()
    context: str | None = None
    context_axis: str = "cp"
    sequence_parallel: str | None = None
    experts: int = 0
    experts_per_token: int = 2
    capacity: float | None = 1.25
    aux_weight: float = 0.01
    stacked: bool = True

    def __post_init__(self) -> None:
        annotated_fields(self)
        optional = ("kv_heads", "hidden", "head_size")
        for what in ("vocab", "seq", "d", "layers", "heads", *optional):
            value = getattr(self, what)
            if value is not None or what not in optional:
                whole("GPTConfig", what, value, 1)
        whole("GPTConfig", "experts", self.experts, 0)
        whole("GPTConfig", "experts_per_token", self.experts_per_token, 1)
        number("GPTConfig", "aux_weight", self.aux_weight)
        probability("GPTConfig", self.dropout)
        if self.norm_eps is not None:
            number("GPTConfig", "norm_eps", self.norm_eps)
        instance("GPTConfig", "rope", self.rope, Rope, "give nn.Rope(base=...)")
        if not isinstance(self.biases, tuple) or not set(map(str, self.biases)) <= set(BIASES):
            raise unfit("GPTConfig", "biases", self.biases, "give a tuple of " + ", ".join(BIASES))
        groups = self.kv_heads or self.heads
        if (self.head_size is None and self.d % self.heads) or self.heads % groups:
            raise fail(
                UsageError,
                f"GPTConfig: d={self.d}, heads={self.heads}, kv_heads={groups} do not divide",
                fix="heads divides d, kv_heads divides heads",
            )
        for what, value, known in (
            ("norm", self.norm, NORMS),
            ("activation", self.activation, ACTIVATIONS),
            ("positions", self.positions, POSITIONS),
            ("block", self.block, BLOCKS),
            ("remat", "recompute" if self.remat is True else self.remat or "save", REMAT),
            ("context", CONTEXTS[0] if self.context is None else self.context, CONTEXTS),
        ):
            one_of("GPTConfig", what, value, known)

        for axis in (self.context_axis, self.sequence_parallel):
            if axis is not None and len(axes_of("GPTConfig", axis)) != 1:
                raise fail(
                    UsageError,
                    f"GPTConfig: {shown(axis)} is not one axis",
                    fix='name one axis of the mesh, e.g. "cp"',
                )

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
        return self.hidden or (8 * self.d // 3 if self.activation == "swiglu" else 4 * self.d)

    def make_norm(self) -> LayerNorm | RMSNorm:
        """A new norm layer of size `d`, of the kind and with the eps of this config."""
        kind = LayerNorm if self.norm == "layer" else RMSNorm
        return kind(self.d) if self.norm_eps is None else kind(self.d, self.norm_eps)


def checked(config: object) -> GPTConfig:
    """A GPTConfig. Raises UsageError for anything else."""
    fix = "give nn.GPTConfig(vocab=..., seq=..., d=..., layers=..., heads=...)"
    return instance("GPT", "the config", config, GPTConfig, fix)


class Attention(Module):
    """Causal self-attention; the heads are a dim of the weights, so they split by head."""

    def __init__(self, c: GPTConfig):
        self.config = c
        size, groups = c.size, c.groups
        std = 0.02
        biased = "qkv" in c.biases
        if groups == c.heads:
            self.qkv = Parameter(c.d, 3, c.heads, size, init=normal(std))
            self.qkv_bias = Parameter(3, c.heads, size, init="zeros") if biased else None
        else:
            self.q = Parameter(c.d, c.heads, size, init=normal(std))
            self.kv = Parameter(c.d, 2, groups, size, init=normal(std))
            self.q_bias = Parameter(1, c.heads, size, init="zeros") if biased else None
            self.kv_bias = Parameter(2, groups, size, init="zeros") if biased else None
        self.out = Parameter(c.heads, size, c.d, init=normal(std / math.sqrt(2 * c.layers)))
        self.out_bias = Parameter(c.d, init="zeros") if "out" in c.biases else None
        self.scope_name = "attention"

    def __call__(self, x: Tensor) -> Tensor:
        """[B, S, d] to [B, S, d], over whole sequences, but for the last bias."""
        x, c = whole_sequence(x, self.config.sequence_parallel), self.config
        batch, seq, d = x.shape
        rows = x.reshape(batch * seq, d)

        def projected(w: Tensor, bias: Tensor | None) -> list[Tensor]:
            """Each [B, heads, S, size], from one plain matrix product."""
            y = F.matmul(rows, w.reshape(d, -1)).reshape(batch, seq, *w.shape[1:])
            if bias is not None:
                y = y + bias.to(y.dtype)
            return [y[:, :, i].transpose(1, 2) for i in range(w.shape[1])]

        if "qkv" in self.__dict__:
            q, k, v = projected(self.qkv, self.qkv_bias)
        else:
            (q,) = projected(self.q.reshape(d, 1, *self.q.shape[1:]), self.q_bias)
            k, v = (_by_head(t, q) for t in projected(self.kv, self.kv_bias))
        bias = None
        n = axis_size("GPT", x, c.context_axis) if c.context == "ring" else 1
        places = zigzag_positions(seq, n) if n > 1 else None
        if c.positions == "rotary":
            rates = c.rope.rates(c.size)
            q, k = (fn.rotary(t, positions=places, rates=rates) for t in (q, k))
        elif c.positions == "alibi":
            bias = as_tensor(alibi_bias(c.heads, seq, 1.0 / math.sqrt(c.size)))
            bias = bias if places is None else F.take_or_zero(bias, places, 1)
        if c.context is None:
            out = fn.flash_attention(q, k, v, causal=True, bias=bias)
        else:
            attend = ring_attention if c.context == "ring" else all_to_all_attention
            out = attend(q, k, v, c.context_axis, causal=True, bias=bias)
        out = out.transpose(1, 2).reshape(batch * seq, -1)
        return F.matmul(out, self.out.reshape(-1, d)).reshape(batch, seq, d)


def _by_head(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values [B, G, S, size] repeated for the heads of `q`, where devices need it.

    Fewer of them than devices lie whole on each, while the heads of `q` are split: each device
    then takes those of its own heads, and nothing is sent.
    """
    (batch, groups, seq, size), heads = t.shape, q.shape[1]
    if groups == heads or dim_axes(t.type.dims[1]) or not dim_axes(q.type.dims[1]):
        return t
    each = t.reshape(batch, groups, 1, seq, size)
    each = F.broadcast_to(each, (batch, groups, heads // groups, seq, size))
    return each.reshape(batch, heads, seq, size)


class MLP(Module):
    """The feed-forward half of a layer, in blocks of rows."""

    def __init__(self, c: GPTConfig):
        hidden = c.width
        biased = "mlp" in c.biases
        self.activation, self.sequence_parallel = c.activation, c.sequence_parallel
        self.up = Parameter(c.d, hidden, init=normal(0.02))
        self.up_bias = Parameter(hidden, init="zeros") if biased else None
        if c.activation == "swiglu":
            self.gate = Parameter(c.d, hidden, init=normal(0.02))
            self.gate_bias = Parameter(hidden, init="zeros") if biased else None
        self.down = Parameter(hidden, c.d, init=normal(0.02 / math.sqrt(2 * c.layers)))
        self.down_bias = Parameter(c.d, init="zeros") if biased else None
        self.scope_name = "mlp"

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] to [..., d], row by row, but for the last bias."""
        h = F.save_for_backward(fn.linear(x, self.up, self.up_bias))
        if self.activation == "swiglu":
            h = fn.silu(F.save_for_backward(fn.linear(x, self.gate, self.gate_bias))) * h
        else:
            h = ACTIVATIONS[self.activation](h)
        return F.matmul(h, self.down)

    def whole(self, x: Tensor, norm: LayerNorm | RMSNorm | None) -> tuple[Tensor, ...]:
        """([B, S, d],) of [B, S, d], in blocks of rows, each normed first where there is a `norm`.

        But for the last bias: it comes after the blocks, or the sum over devices would be completed
        in each.
        """
        if self.sequence_parallel is not None:
            x, norm = whole_sequence(x if norm is None else norm(x), self.sequence_parallel), None
        return (fn.by_rows(lambda r: self(r if norm is None else norm(r)), x),)


class Experts(MoE):
    """The feed-forward half of a layer with experts."""

    down_bias = None

    def __init__(self, c: GPTConfig):
        self.ring_axis = c.context_axis if c.context == "ring" else None
        self.even = c.aux_weight > 0
        gated = c.activation == "swiglu"
        super().__init__(
            c.d, c.width, c.experts, c.experts_per_token, gated=gated, capacity=c.capacity,
            activation="silu" if gated else c.activation,
        )  # fmt: skip

    def whole(self, x: Tensor, norm: LayerNorm | RMSNorm | None) -> tuple[Tensor, ...]:
        """[B, S, d] to [B, S, d] and the auxiliary loss."""
        zigzag = axis_size("GPT", x, self.ring_axis)
        route = self.routed if self.even else self._routed
        y, routing = route(x if norm is None else norm(x), zigzag)
        return y, routing.aux_loss


class TransformerBlock(Module):
    """A transformer block on [B, S, d]: norm, attention, residual, then norm, MLP, residual.

    With `config.block` "parallel", attention and MLP take the same input side by side. Attention
    runs a few sequences at a time, norm and MLP a block of rows at a time; of their intermediates
    only values marked by `ts.save_for_backward` outlive a block. The residual is added outside of
    these loops, so under tensor parallelism one all_reduce completes each sublayer (one for both,
    side by side).
    """

    def __init__(self, c: GPTConfig):
        checked(c)
        self.norm_1, self.attention = c.make_norm(), Attention(c)
        self.norm_2 = c.make_norm() if c.block != "parallel" else None
        if c.experts:
            self.moe = Experts(c)
        else:
            self.mlp = MLP(c)
        self.dropout, self.block = c.dropout, c.block
        self.sequence_parallel = c.sequence_parallel
        self.scope_name = "block"

    def __call__(self, x: Tensor) -> Any:
        """[B, S, d] to [B, S, d]; with experts, to that and their auxiliary loss."""
        a, m = self.attention, self.__dict__.get("moe") or self.mlp
        if self.block == "sequential":
            x = x + self._done(a(self.norm_1(x)), a.out_bias)
            y, *aux = m.whole(x, self.norm_2)
            x = x + self._done(y, m.down_bias)
        else:
            h = self.norm_1(x)
            y, *aux = m.whole(h if self.norm_2 is None else x, self.norm_2)
            x = x + self._done(a(h) + y, a.out_bias, m.down_bias)
        return (x, *aux) if aux else x

    def _done(self, y: Tensor, *biases: Tensor | None) -> Tensor:
        """A sublayer's sums, laid out as the residual, with its biases and dropout."""
        y = split_sequence(y, self.sequence_parallel)
        for bias in biases:
            y = y if bias is None else y + bias.to(y.dtype)
        return fn.dropout(y, self.dropout)


class GPT(Module):
    """A decoder-only transformer: token ids [B, S] to logits [B, S, vocab].

    `loss(ids, labels)` gives the training loss without the whole logits. `config` is a `GPTConfig`.
    Raises UsageError if it is not one, ShapeError at a call if ids are not integers [B, S] with S
    at most `config.seq`.
    """

    origin: str = ""
    """The config.json of the checkpoint it was loaded from, if any."""

    def __init__(self, config: GPTConfig):
        self.config = c = checked(config)
        self.embed = Embedding(c.vocab, c.d)
        if c.positions == "learned":
            self.position = Parameter(c.seq, c.d, init=normal(0.02))
        self.blocks = Stack(TransformerBlock(c), c.layers, c.loop, c.remat, c.stacked)
        self.norm = c.make_norm()
        if not c.tied:
            self.head = Parameter(c.d, c.vocab, init=normal(0.02))
        self.scope_name = "gpt"
        self.parameters()

    def features(self, ids: Tensor) -> Any:
        """The last hidden layer [B, S, d]; with experts, (that, the auxiliary losses [layers]).

        This is the part of the model that a pipeline splits into stages. Raises ShapeError if `ids`
        are not integers [B, S] with S at most `config.seq`.
        """
        ids = as_tensor(ids)
        if ids.ndim != 2 or ids.shape[1] > self.config.seq or not ids.dtype.is_int:
            raise fail(
                ShapeError,
                f"GPT: ids must be integers [B, S] with S at most {self.config.seq}",
                [("ids", ids.type)],
                fix="cut the sequences, or build the model with a longer config.seq",
            )
        c = self.config
        # Whole from the start: a residual stream that is partial is completed in every layer anew.
        x = F.complete(split_sequence(self.embed(self._placed(ids)), c.sequence_parallel))
        if c.positions == "learned":
            x = x + self._placed(self.position[: ids.shape[1]], 0)
        x, *aux = made if isinstance(made := self.blocks(x), tuple) else (made,)
        x = whole_sequence(self.norm(x), c.sequence_parallel)
        return (x, *aux) if aux else x

    def _head(self) -> Tensor:
        return self.embed.weight.T if self.config.tied else self.head

    def _devices(self, x: Tensor) -> int:
        """Over how many devices `context` splits the sequence."""
        if self.config.context is None:
            return 1
        where = x if x.mesh is not None else self.embed.weight
        return axis_size("GPT", where, self.config.context_axis)

    def _placed(self, x: Tensor, dim: int = 1) -> Tensor:
        """`x` with its sequence, `dim`, in the order and layout that `context` wants."""
        c, n = self.config, self._devices(x)
        if n == 1:
            return x
        fix = f"make it a multiple of {2 * n if c.context == 'ring' else n}"
        text = "a sequence of {count} does not divide over {parts} devices"
        divides("GPT", x.shape[dim], n, text, fix, x=x.type)
        if c.context == "ring":
            x = zigzag(x, n, dim)
        mesh = x.mesh or self.embed.weight.mesh
        return split_sequence(F.relayout(x, x.type.on(mesh)), c.context_axis, dim)

    def __call__(self, ids: Tensor) -> Tensor:
        x = self.features(ids)
        y = F.matmul(x[0] if isinstance(x, tuple) else x, self._head())
        return unzigzag(y, self._devices(y)) if self.config.context == "ring" else y

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy in nats per token, f32[], without the whole logits.

        `ids` and `labels` are integers [B, S]. With experts, `aux_weight` times the mean auxiliary
        loss is added.
        """
        return self.loss_of(self.features(ids), labels)

    def loss_of(self, features: Any, labels: Tensor) -> Tensor:
        """The same loss from the result of `features`."""
        x, *aux = features if isinstance(features, tuple) else (features,)
        loss = linear_cross_entropy(x, self._head(), self._placed(as_tensor(labels)))
        return loss + self.config.aux_weight * F.mean(aux[0]) if aux else loss
