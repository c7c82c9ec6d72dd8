"""`Row`: a published training run as a row of a table, read from CSV; every mistake is named.

>>> text = "hidden,layers,heads,vocab,seq,global_batch,chips,tp\\n4096,32,32,50304,2048,256,8,3"
>>> read_rows(text)
Traceback (most recent call last):
tessera.UsageError: table: 2 cells cannot be read
  row 1, column heads : 32 is not divided by tp=3
  row 1, column chips : 8 chips are no mesh of tp=3 cp=1 pp=1
  fix                 : mend these cells; docs/accuracy.md lists the columns
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from ..core.errors import MeshError, UsageError
from ..ir.schedule.pipelines.orders import named_schedule
from .machines import machine_from_file

CHOICES = {
    "recompute": ("none", "selective", "early_stop", "full"),
    "attention": ("flash", "flash1", "stored"),
    "mlp": ("gelu", "swiglu"),
    "dtype": ("bf16", "f16", "f32"),
    "zero": ("0", "1", "2", "3"),
    "flops": ("model", "hardware"),
}
REQUIRED = ("hidden", "layers", "heads", "vocab", "seq", "global_batch", "chips")


@dataclass(frozen=True, slots=True)
class Row:
    """A run: a GPT's sizes, its batch, the mesh, and how the implementation trains it.

    - `kv_heads` 0: as many as heads; `head_dim` 0: hidden / heads; `ffn` 0: 4 hidden for the MLP
      "gelu", 8/3 hidden for "swiglu"; `dp` 0: what the other axes leave of the chips.
    - `experts` 0: none; else `top_k` of them serve a token, split over `ep` of the data axis.
    - `zero`: 0 to 3. `sp`: tensor parallelism splits the sequence between its products.
    - `recompute`: "none", "selective" (the core of attention), "early_stop" (each layer, but not
      its last product, whose result is not read: PyTorch's checkpoints that are not reentrant, and
      remat here) or "full" (each whole layer, as Megatron-LM).
    - `fused`: whether norms, activations and softmaxes are kernels of their own; 0: PyTorch's ops
      one by one, as far as XLA would fuse them.
    - `attention`: "flash", "flash1" (the first FlashAttention, until 2023), or "stored" if the
      scores of all pairs are in memory. `dropout` of stored probabilities and of each sublayer.
    - `overlap_dp`, `overlap_pp`: whether gradients are summed during the backward pass, and whether
      a stage computes while it sends. `grad_bytes` of a gradient that is summed.
    - `flops`: "model", or "hardware" if `tflops_per_chip` counts recomputed products.
    - `chip` "": that of the cluster, which is a preset or a machine file.
    - `given` has the cells of all columns that are no field here.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    seq: int
    global_batch: int
    chips: int
    micro_batch: int = 1
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    experts: int = 0
    top_k: int = 2
    mlp: str = "gelu"
    tp: int = 1
    pp: int = 1
    dp: int = 0
    cp: int = 1
    ep: int = 1
    interleave: int = 1
    schedule: str = "1F1B"
    zero: int = 0
    sp: int = 0
    recompute: str = "none"
    attention: str = "flash"
    dropout: float = 0.0
    dtype: str = "bf16"
    fused: int = 1
    overlap_dp: int = 1
    overlap_pp: int = 1
    grad_bytes: int = 4
    flops: str = "model"
    chip: str = ""
    cluster: str = "dgx_a100"
    given: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def layer_flops(self) -> float:
        """Operations of a layer's forward pass for a token; no part of the scores is left out."""
        heads = self.heads + self.kv_heads
        products = 3 if self.mlp == "swiglu" else 2
        mlp = products * self.hidden * self.ffn * (self.top_k if self.experts else 1)
        return 4.0 * self.hidden * heads * self.head_dim + self.score_flops + 2.0 * mlp

    @property
    def score_flops(self) -> float:
        """Operations of a layer's two products with scores for a token, forward."""
        return 4.0 * self.seq * self.heads * self.head_dim

    @property
    def model_flops(self) -> float:
        """Operations of a step: three times those of its forward pass."""
        one = self.layers * self.layer_flops + 2.0 * self.hidden * self.vocab
        return 3.0 * self.global_batch * self.seq * one

    @property
    def hardware_flops(self) -> float:
        """`model_flops` and those of the recomputed products."""
        last = 2.0 * self.hidden * self.ffn * (self.top_k if self.experts else 1)
        again = {
            "none": 0.0, "selective": self.score_flops, "full": self.layer_flops,
            "early_stop": self.layer_flops - last,
        }  # fmt: skip
        tokens = self.global_batch * self.seq
        return self.model_flops + tokens * self.layers * again[self.recompute]


_TYPES = {f.name: str(f.type) for f in fields(Row) if f.name != "given"}
_ZERO = (
    "ffn",
    "kv_heads",
    "head_dim",
    "experts",
    "dp",
    "zero",
    "sp",
    "overlap_dp",
    "overlap_pp",
    "fused",
)


def read_rows(text: str) -> list[Row]:
    """Returns the rows of a table in CSV; lines that begin with # are comments. Raises UsageError
    with every cell that cannot be read, does not fit its row, or is missing."""
    table = _reader(text)
    faults: list[tuple[str, object]] = []
    names = columns(text)
    for name in REQUIRED:
        if name not in names:
            faults.append((f"column {name}", "is missing"))
    for name in names:
        meant = get_close_matches(name, _TYPES, 1, 0.8)
        if name not in _TYPES and meant and meant[0] not in names:
            faults.append((f"column {name}", f"is read as no column; {meant[0]} is one"))
    rows, bad_header = [], bool(faults)
    for i, cells in enumerate(table, 1):
        if bad_header:
            break
        found: dict[str, Any] = {}
        bad = len(faults)
        for name, cell in cells.items():
            if name is None or cell is None:
                faults.append((f"row {i}", "has another number of cells than the header"))
            elif name not in _TYPES:
                found.setdefault("given", {})[name] = cell
            elif cell.strip():
                try:
                    found[name] = _read(name, cell.strip())
                except ValueError as error:
                    faults.append((f"row {i}, column {name}", error))
            elif name in REQUIRED:
                faults.append((f"row {i}, column {name}", "is empty"))
        if len(faults) == bad:
            row = _filled(found)
            wrong = [(f"row {i}, column {name}", why) for name, why in _faults(row)]
            faults += wrong
            rows.append(row)
    if faults:
        count = f"{len(faults)} cell{'s' if len(faults) > 1 else ''}"
        raise UsageError(
            f"table: {count} cannot be read",
            rows=faults,
            fix="mend these cells; docs/accuracy.md lists the columns",
            at="",
        )
    return rows


def records(text: str) -> list[dict[str, str]]:
    """Returns the cells of each row by column, as text."""
    return [*_reader(text)]


def columns(text: str) -> list[str]:
    """Returns the columns of a table."""
    return [*(_reader(text).fieldnames or ())]


def _reader(text: str) -> csv.DictReader[str]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return csv.DictReader(io.StringIO("\n".join(lines)))


def _read(name: str, cell: str) -> int | float | str:
    """Returns the value of a cell. Raises ValueError with the reason if it cannot."""
    if name in CHOICES and cell not in CHOICES[name]:
        raise ValueError(f"{cell!r} is none of {', '.join(CHOICES[name])}")
    if _TYPES[name] == "str":
        return cell
    if _TYPES[name] == "float":
        if not re.fullmatch(r"0?\.[0-9]+|0", cell):
            raise ValueError(f"{cell!r} is no number from 0 to below 1")
        return float(cell)
    least = 0 if name in _ZERO else 1
    if not cell.isdecimal() or int(cell) < least:
        raise ValueError(f"{cell!r} is no whole number from {least} on")
    return int(cell)


def _filled(found: dict[str, Any]) -> Row:
    """Returns the row with the defaults that follow from other columns."""
    row = Row(**found)
    more: dict[str, Any] = {}
    if not row.kv_heads:
        more["kv_heads"] = row.heads
    if not row.head_dim:
        more["head_dim"] = row.hidden // row.heads
    if not row.ffn:
        more["ffn"] = 4 * row.hidden if row.mlp == "gelu" else 8 * row.hidden // 3
    if not row.dp:
        more["dp"] = max(1, row.chips // (row.tp * row.cp * row.pp))
    return Row(**{**found, **more})


def _faults(r: Row) -> Iterator[tuple[str, str]]:
    """Yields (column, reason) of each contradiction between the columns of a row."""

    for name, by, parts in (
        ("heads", f"kv_heads={r.kv_heads}", r.kv_heads),
        ("heads", f"tp={r.tp}", r.tp),
        ("global_batch", f"micro_batch={r.micro_batch} dp={r.dp}", r.micro_batch * r.dp),
        ("seq", f"cp={r.cp}", r.cp),
        ("dp", f"ep={r.ep}", r.ep),
    ):
        if getattr(r, name) % parts:
            yield name, f"{getattr(r, name)} is not divided by {by}"

    if r.head_dim == r.hidden // r.heads and r.hidden % r.heads:
        yield "heads", f"{r.heads} heads do not divide hidden={r.hidden}; give head_dim"
    if r.layers < r.pp * r.interleave - 2:
        yield "layers", f"{r.layers} layers are too few for pp={r.pp} interleave={r.interleave}"
    if r.tp * r.cp * r.pp * r.dp != r.chips:
        shape = f"tp={r.tp} cp={r.cp} pp={r.pp}"
        if r.chips % (r.tp * r.cp * r.pp) == 0:
            shape += f" dp={r.dp}"
        yield "chips", f"{r.chips} chips are no mesh of {shape}"
    if r.ep > 1 and (not r.experts or r.experts % r.ep):
        yield "ep", f"{r.experts} experts are not divided by ep={r.ep}"
    if r.experts and r.top_k > r.experts:
        yield "top_k", f"{r.top_k} of {r.experts} experts"
    if r.sp and r.tp == 1:
        yield "sp", "there is no tensor parallelism (tp=1)"
    if r.interleave > 1 and r.pp == 1:
        yield "interleave", "there is no pipeline (pp=1)"
    if r.interleave > 1 and r.microbatches % r.pp:
        yield "interleave", f"{r.microbatches} microbatches are no multiple of pp={r.pp}"
    if r.attention == "stored" and (r.mlp != "gelu" or r.cp > 1 or r.kv_heads != r.heads):
        yield "attention", "stored scores are for MLPs with gelu, without cp and kv_heads"
    try:
        named_schedule(r.schedule)
    except UsageError as error:
        yield "schedule", str(error).splitlines()[0]
    try:
        machine = machine_from_file(r.cluster)
    except MeshError as error:
        yield "cluster", str(error).splitlines()[0]
        return
    assert machine.chip is not None
    if r.chip and r.chip != machine.chip.name:
        yield "chip", f"{r.cluster} has chips {machine.chip.name}"
    unit = math.prod(machine.shape[1:])
    if r.chips > unit and r.chips % unit:
        yield "chips", f"{r.chips} chips are no whole units of {unit} of {r.cluster}"
    if r.cluster.endswith((".yaml", ".textproto")) and r.chips > machine.size:
        yield "chips", f"{r.cluster} has {machine.size} chips"
