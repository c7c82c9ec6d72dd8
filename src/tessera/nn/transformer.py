"""A GPT: decoder-only transformer with the choices that today's models make."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.errors import ShapeError, UsageError, fail
from ..lang import functions as F
from ..lang.checks import probability, shown, whole
from ..lang.create import all_reduce
from ..lang.tensor import Tensor, as_tensor
from . import functional as fn
from .layers import Embedding, LayerNorm, RMSNorm, normal
from .module import Module, Parameter
from .stack import Stack


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices. `kv_heads` None is `heads`; `tied` uses the embedding as the head."""

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
    remat: bool = False

    def __post_init__(self) -> None:
        for what in ("vocab", "seq", "d", "layers", "heads", "kv_heads", "hidden"):
            value = getattr(self, what)
            if value is not None or what not in ("kv_heads", "hidden"):
                whole("GPTConfig", what, value, 1)
        probability("GPTConfig", self.dropout)
        groups = self.kv_heads or self.heads
        if self.d % self.heads or self.heads % groups:
            raise fail(
                UsageError,
                f"GPTConfig: d={self.d}, heads={self.heads}, kv_heads={groups} do not divide",
                fix="heads divides d, kv_heads divides heads",
            )
        for value, known in (
            (self.norm, ("layer", "rms")),
            (self.activation, ("gelu", "swiglu")),
            (self.positions, ("learned", "rotary")),
        ):
            if not isinstance(value, str) or value not in known:
                raise fail(
                    UsageError,
                    f"GPTConfig: {shown(value)} is not known",
                    fix="use " + " or ".join(known),
                )

    def make_norm(self) -> LayerNorm | RMSNorm:
        return LayerNorm(self.d) if self.norm == "layer" else RMSNorm(self.d)


def checked(config: object) -> GPTConfig:
    """A GPTConfig. Raises UsageError for anything else."""
    if isinstance(config, GPTConfig):
        return config
    raise fail(
        UsageError,
        f"GPT: the config cannot be {shown(config)}",
        fix="give nn.GPTConfig(vocab=..., seq=..., d=..., layers=..., heads=...)",
    )


class Attention(Module):
    """Causal self-attention; the heads are a dim of the weights, so they split by head."""

    def __init__(self, c: GPTConfig):
        self.config = c
        size, groups = c.d // c.heads, c.kv_heads or c.heads
        std = 0.02
        if groups == c.heads:
            self.qkv = Parameter(c.d, 3, c.heads, size, init=normal(std))
        else:
            self.q = Parameter(c.d, c.heads, size, init=normal(std))
            self.kv = Parameter(c.d, 2, groups, size, init=normal(std))
        self.out = Parameter(c.heads, size, c.d, init=normal(std / math.sqrt(2 * c.layers)))
        self.scope_name = "attention"

    def __call__(self, x: Tensor) -> Tensor:
        """[B, S, d] to [B, S, d], over whole sequences."""
        c, (batch, seq, d) = self.config, x.shape
        rows = x.reshape(batch * seq, d)

        def projected(w: Tensor) -> list[Tensor]:
            """Each [B, heads, S, size], from one plain matrix product."""
            y = F.matmul(rows, w.reshape(d, -1)).reshape(batch, seq, *w.shape[1:])
            return [y[:, :, i].transpose(1, 2) for i in range(w.shape[1])]

        if "qkv" in self.__dict__:
            q, k, v = projected(self.qkv)
        else:
            (q,), (k, v) = projected(self.q.reshape(d, 1, *self.q.shape[1:])), projected(self.kv)
        if c.positions == "rotary":
            q, k = fn.rotary(q), fn.rotary(k)
        out = fn.flash_attention(q, k, v, causal=True).transpose(1, 2).reshape(batch * seq, -1)
        return F.matmul(out, self.out.reshape(-1, d)).reshape(batch, seq, d)


class MLP(Module):
    """The feed-forward half of a layer, in blocks of rows."""

    def __init__(self, c: GPTConfig):
        hidden = c.hidden or (4 * c.d if c.activation == "gelu" else 8 * c.d // 3)
        self.activation = c.activation
        self.up = Parameter(c.d, hidden, init=normal(0.02))
        if c.activation == "swiglu":
            self.gate = Parameter(c.d, hidden, init=normal(0.02))
        self.down = Parameter(hidden, c.d, init=normal(0.02 / math.sqrt(2 * c.layers)))
        self.scope_name = "mlp"

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d] to [..., d], row by row."""
        h = F.keep(F.matmul(x, self.up))
        if self.activation == "swiglu":
            h = fn.silu(F.keep(F.matmul(x, self.gate))) * h
        else:
            h = fn.gelu(h)
        return F.matmul(h, self.down)


class TransformerBlock(Module):
    """Norm, attention, residual; norm, MLP, residual.

    Attention runs a few sequences at a time, norm and MLP some rows at a time; of their insides
    only what is marked with `keep` outlives a block. The residual is added outside, so that under
    tensor parallelism one all_reduce completes the whole sublayer.
    """

    def __init__(self, c: GPTConfig):
        checked(c)
        self.norm_1, self.attention = c.make_norm(), Attention(c)
        self.norm_2, self.mlp = c.make_norm(), MLP(c)
        self.dropout = c.dropout
        self.scope_name = "block"

    def __call__(self, x: Tensor) -> Tensor:
        x = x + fn.dropout(self.attention(self.norm_1(x)), self.dropout)
        m = fn.by_rows(lambda r: self.mlp(self.norm_2(r)), x)
        return x + fn.dropout(m, self.dropout)


class GPT(Module):
    """Token ids [B, S] to logits [B, S, vocab], or to a loss with `loss`."""

    def __init__(self, config: GPTConfig):
        self.config = c = checked(config)
        self.embed = Embedding(c.vocab, c.d)
        if c.positions == "learned":
            self.position = Parameter(c.seq, c.d, init=normal(0.02))
        self.blocks = Stack(TransformerBlock(c), c.layers, c.loop, c.remat)
        self.norm = c.make_norm()
        if not c.tied:
            self.head = Parameter(c.d, c.vocab, init=normal(0.02))
        self.scope_name = "gpt"
        self.parameters()

    def features(self, ids: Tensor) -> Tensor:
        """The last hidden layer [B, S, d]."""
        ids = as_tensor(ids)
        if ids.ndim != 2 or ids.shape[1] > self.config.seq or not ids.dtype.is_int:
            raise fail(
                ShapeError,
                f"GPT: ids must be integers [B, S] with S at most {self.config.seq}",
                [("ids", ids.type)],
                fix="cut the sequences, or build the model with a longer config.seq",
            )
        # Whole from the start: a residual stream that is partial is completed in every layer anew.
        x = all_reduce(self.embed(ids))
        if self.config.positions == "learned":
            x = x + self.position[: ids.shape[1]]
        return self.norm(self.blocks(x))

    def _head(self) -> Tensor:
        return self.embed.weight.T if self.config.tied else self.head

    def __call__(self, ids: Tensor) -> Tensor:
        return F.matmul(self.features(ids), self._head())

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, the logits never whole."""
        return fn.linear_cross_entropy(self.features(ids), self._head(), labels)
