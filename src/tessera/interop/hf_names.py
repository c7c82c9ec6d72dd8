"""Names of the weights in HuggingFace files, and the layout of our weights in their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..nn.gpt_config import GPTConfig
from .slices import Array, Piece

LAYER = "blocks.block."
"""The prefix of the names of our stacked weights; names of their pieces have a {} for the layer."""
Table = dict[str, list[Piece]]


@dataclass(frozen=True)
class Names:
    """Names of tensors in files, without ".weight" and ".bias"; those after `layer` are within a
    layer.

    `qkv` are three tensors, or a fused one: with "groups", the queries of a group, its key and its
    value, group by group; with "kinds", all queries, then all keys, then all values. `gate_up` is a
    tensor with the gate's columns before those of up. `experts` are the router and, for each
    expert, gate, down and up. With `joined` matrices are [in, out].
    """

    embed: str
    norm: str
    layer: str
    norm_1: str
    norm_2: str
    qkv: tuple[str, ...]
    out: str
    up: str
    down: str
    gate: str = ""
    gate_up: str = ""
    fused: str = ""
    q_norm: str = ""
    k_norm: str = ""
    post_norm_1: str = ""
    post_norm_2: str = ""
    position: str = ""
    head: str = "lm_head"
    joined: bool = False
    experts: tuple[str, ...] = ()

    def table(self, c: GPTConfig) -> Table:
        """For each of our weights, the tensors of the files that contain it."""
        t = _Builder(self, c)
        t.add("embed.weight", "vd", f"{self.embed}.weight", ("v", "d"))
        t.norm("norm", self.norm)
        if not c.tied:
            t.add("head", "dv", f"{self.head}.weight", ("v", "d"))
        if "head" in c.biases:
            t.add("head_bias", "v", f"{self.head}.bias", ("v",))
        if c.positions == "learned":
            t.add("position", "nd", f"{self.position}.weight", ("n", "d"))
        t.norm(LAYER + "norm_1", t.at(self.norm_1))
        if c.block != "parallel":
            t.norm(LAYER + "norm_2", t.at(self.norm_2))
        if c.block == "post_norms":
            t.norm(LAYER + "post_norm_1", t.at(self.post_norm_1))
            t.norm(LAYER + "post_norm_2", t.at(self.post_norm_2))
        if c.qk_norm:
            t.norm(LAYER + "attention.q_norm", t.at(self.q_norm), "s")
            t.norm(LAYER + "attention.k_norm", t.at(self.k_norm), "s")
        t.qkv()
        t.matrix("attention.out", "hsd", self.out, "hs", "d", "out")
        if c.experts:
            t.experts()
            return t.table
        t.matrix("mlp.down", "fd", self.down, "f", "d", "mlp")
        if self.gate_up:
            for i, ours in enumerate(("gate", "up")):
                places = np.arange(c.width) + i * c.width
                t.matrix(f"mlp.{ours}", "df", self.gate_up, "d", "f", "mlp", places, 2 * c.width)
            return t.table
        t.matrix("mlp.up", "df", self.up, "d", "f", "mlp")
        if c.gated:
            t.matrix("mlp.gate", "df", self.gate, "d", "f", "mlp")
        return t.table


class _Builder:
    """A builder of a table."""

    def __init__(self, names: Names, c: GPTConfig) -> None:
        self.names, self.c, self.table = names, c, Table()
        self.sizes = {
            "d": c.d, "h": c.heads, "g": c.groups, "s": c.size, "f": c.width, "v": c.vocab,
            "n": c.seq, "e": max(1, c.experts),
        }  # fmt: skip

    def at(self, name: str) -> str:
        return f"{self.names.layer}.{name}"

    def add(
        self, ours: str, letters: Sequence[str], name: str, theirs: Sequence[str], **more: Any
    ) -> None:
        piece = Piece(name, tuple(theirs), letters, self.sizes, **more)
        self.table.setdefault(ours, []).append(piece)

    def matrix(
        self,
        ours: str,
        letters: str,
        name: str,
        come: str,
        go: str,
        biased: str,
        places: Array | None = None,
        total: int = 0,
    ) -> None:
        """Adds a weight of each layer from dims `come` to dims `go`, and its bias."""
        theirs = (come, go) if self.names.joined else (go, come)
        more: dict[str, Any] = {"places": places, "total": total, "ending": go[-1]}
        self.add(LAYER + ours, letters, f"{self.at(name)}.weight", theirs, **more)
        if biased in self.c.biases:
            self.add(f"{LAYER}{ours}_bias", go, f"{self.at(name)}.bias", (go,), **more)

    def norm(self, ours: str, name: str, dim: str = "d") -> None:
        self.add(f"{ours}.weight", dim, f"{name}.weight", (dim,))
        if self.c.norm == "layer":
            self.add(f"{ours}.bias", dim, f"{name}.bias", (dim,))

    def qkv(self) -> None:
        """Adds queries, keys and values: as separate tensors, or as parts of a fused one."""
        c = self.c
        one = c.groups == c.heads
        fused = self._fused()
        for i, name in enumerate(self.names.qkv * 3 if fused else self.names.qkv):
            heads = "h" if one or i == 0 else "g"
            ours, at = ("qkv", i) if one else ("kv", i - 1) if i else ("q", -1)
            letters = f"{'' if at < 0 else at}{heads}s"
            more: dict[str, Any] = {}
            if fused is not None:
                more = {"places": fused[i], "total": sum(p.size for p in fused)}
            out, come = f"{heads}s", "d"
            theirs = (come, out) if self.names.joined else (out, come)
            where = f"{LAYER}attention.{ours}"
            self.add(where, f"d{letters}", f"{self.at(name)}.weight", theirs, **more)
            if "qkv" in c.biases:
                # The bias of separate queries has a dim of size 1, where that of keys and values
                # has 2.
                to = letters if at >= 0 else f"0{letters}"
                self.add(f"{where}_bias", to, f"{self.at(name)}.bias", (out,), **more)

    def _fused(self) -> list[Array] | None:
        c, size = self.c, self.c.size
        if not self.names.fused:
            return None
        if self.names.fused == "kinds":
            ends = np.cumsum([0, c.heads, c.groups, c.groups]) * size
            return [np.arange(a, b).reshape(-1, size) for a, b in pairwise(ends)]
        each = c.heads // c.groups
        places = np.arange(c.groups * (each + 2) * size).reshape(c.groups, each + 2, size)
        return [places[:, :each].reshape(c.heads, size), places[:, each], places[:, each + 1]]

    def experts(self) -> None:
        """Adds the router, and the matrices of each expert."""
        router, *parts = self.names.experts
        self.add(f"{LAYER}moe.router", "de", f"{self.at(router)}.weight", ("e", "d"))
        for ours, name in zip(("gate", "down", "up"), parts, strict=True):
            go, come = ("d", "f") if ours == "down" else ("f", "d")
            for i in range(self.c.experts):
                file = self.at(name.replace("[]", str(i)))
                self.add(f"{LAYER}moe.{ours}", (str(i), come, go), f"{file}.weight", (go, come))
