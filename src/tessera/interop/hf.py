"""How does a model come from a HuggingFace folder onto a mesh, and go back?

Each device's block of a weight is read from the files by itself, so where a strategy splits a
weight, the whole of it is in no memory. What the files call it and how they lay it out is data:
`hf_models.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..core.checks import file_access, instance, same_names, shown, unfit, whole
from ..core.context import settings
from ..core.dtypes import DType, dtype_of, promote
from ..core.errors import DTypeError, ShapeError, UsageError, fail
from ..core.files import sync
from ..core.layout import TensorType, dim_axes, plain, ways
from ..core.mesh import Mesh
from ..core.renamed import renamed_arguments
from ..core.reshard import gathered
from ..lang.checks import mesh_or_none, needed_mesh
from ..lang.engine import Parts, engine
from ..lang.first_process import by_first, to_first
from ..lang.strategy import Strategy, check_reach, layout_rule, strategy_or_none
from ..lang.tensor import Tensor
from ..nn.experts.layer import MoE
from ..nn.gpt_config import GPTConfig
from ..nn.module import load_with_dtypes
from ..nn.transformer import GPT
from .hf_files import (
    CONFIG,
    STORED,
    Entry,
    Outgoing,
    Weights,
    read_json,
    safetensors_library,
    write_json,
    write_weights,
)
from .hf_models import KNOWN, Architecture
from .hf_names import LAYER, Table
from .slices import Array, Piece

# What older folders hold besides the weights: masks and rates, which are computed.
COMPUTED = re.compile(r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
SHARD_BYTES = 5 * 2**30
# Fields of a config that say how a model is trained and run, not what it computes.
EXECUTION = (
    "dropout", "loop", "remat", "stacked", "context", "context_axis", "sequence_parallel",
)  # fmt: skip
APART = "blocks.layers."
"""How the names of our weights begin where each layer has its own; then comes its number."""


@renamed_arguments("checkpoint.load_hf", plan="strategy")
def load_hf(
    folder: str | Path,
    mesh: Mesh | None = None,
    strategy: Strategy | str | None = None,
    dtype: Any = None,
) -> GPT:
    """The model of a HuggingFace folder (config.json, safetensors), its weights laid out by
    `strategy`.

    It knows GPT-2, GPT-NeoX, Llama, Mistral, Mixtral, Qwen2, Qwen3 (and its experts), Gemma 1 to 3,
    Phi, Phi-3 and Falcon. Without `mesh` the current one is used;
    without either the weights are on one device. `dtype` None keeps that of the files. If there are
    fewer heads of keys and values than devices along an axis, each device holds all of them.
    Dropout is not applied. Raises UsageError if the folder or its model is unknown or tensors are
    missing; ShapeError or DTypeError if a tensor does not fit config.json; MeshError if there is a
    strategy and no mesh; StrategyError if `strategy` is not a strategy.
    """
    mesh = mesh_or_none("load_hf", mesh) or settings().mesh
    want = None if dtype is None else dtype_of(dtype)
    laid_by = _strategy(strategy, mesh)
    path = _folder("load_hf", folder)
    raw = read_json(path / CONFIG)
    known = _architecture(raw.get("model_type"), "load_hf: config.json: model_type")
    if raw.get("quantization_config") is not None:
        raise fail(
            UsageError,
            "load_hf: config.json: 'quantization_config' is set, which is not supported",
            fix="load a checkpoint that is not quantized",
        )
    config = known.read(raw)
    table = known.table(config)
    model = GPT(config)
    if mesh is not None and laid_by is not None:
        laid = layout_rule(laid_by, "weight")
        types = model.parameters().items()
        check_reach(laid_by, {n: laid(n, plain(t.dtype, t.shape, mesh)) for n, t in types})
    with Weights(path) as files:
        entries = _checked(files.entries, table, config, known.prefix)
        made = {
            name: _placed(name, t.shape, table[name], entries, mesh, laid_by, want)
            for name, t in model.parameters().items()
        }
    load_with_dtypes(model, made)
    model.origin = json.dumps(raw)
    return model


def save_hf(
    model: GPT,
    folder: str | Path,
    architecture: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes `model` as a HuggingFace folder (weights, config.json) that `transformers` loads.

    A model that was loaded from such a folder keeps its architecture and the rest of its config.
    For others `architecture` says which to write ("gpt2", "llama", ...; None: the first that fits).
    How a model is run (`stacked`, `context`, `sequence_parallel`, `remat`) is not saved. A bias
    that the architecture has and the model lacks is written as zeros. Weights are gathered to this
    host, file by file of at most `shard_bytes` bytes. Of several processes all call it, and the
    first one writes; its errors are raised in all. Raises UsageError if the folder holds a model
    already or cannot be written, if the architecture cannot express the model, or if experts lie in
    the order of a placement.
    """
    instance(
        "save_hf",
        "the model",
        model,
        GPT,
        "give an nn.GPT, then the folder: save_hf(model, folder)",
    )
    most = whole("save_hf", "shard_bytes", shard_bytes, 1)
    for name, module in model.named_modules():
        if isinstance(module, MoE) and module.placement is not None and module.placed:
            raise fail(
                UsageError,
                "save_hf: experts lie in the order of a placement",
                [("layer", name), ("placement", module.placement.text())],
                fix="put each in its own row:"
                f" layer.rehash(nn.place_experts({module.router.shape[-1]}, 1))",
            )
    known, options, config = _described(model, architecture)
    weights = _by_layer(dict(model.named_parameters(remove_duplicate=False)))
    path = _folder("save_hf", folder)
    label = f"save_hf {str(path)!r}"
    stored = {"dtype": weights["embed.weight"][0].dtype.numpy.name}
    stored |= {"torch_dtype": stored["dtype"]} if "torch_dtype" in options else {}
    out = _outgoing(weights, known.table(config), config, model.config.stacked)
    part = by_first(label, lambda: _begun(path))
    try:
        write_weights(label, part or path, out, most)
        by_first(label, lambda: _finished(part or path, path, {**options, **stored}))
    finally:  # of a disk that is full, or an interrupt
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


# -- asked at the door ----------------------------------------------------------------------------
def _folder(name: str, folder: object) -> Path:
    if isinstance(folder, (str, Path)) and str(folder) and "\0" not in str(folder):
        return Path(folder)
    raise unfit(name, "the folder", folder, "give a path")


def _strategy(given: object, mesh: Mesh | None) -> Strategy | None:
    found = strategy_or_none("load_hf", "the strategy", given, "tensor_parallel")
    if found is not None:
        needed_mesh("load_hf", mesh)
    return found


def _architecture(name: object, what: str) -> Architecture:
    if isinstance(name, str) and name in KNOWN:
        return KNOWN[name]
    fix = "known: " + ", ".join(KNOWN)
    if name in ("deepseek_v2", "deepseek_v3"):
        fix += "; of DeepSeek's the latent attention (MLA) is missing, its experts are nn.MoE's"
    raise fail(UsageError, f"{what} {shown(name)} is not known", fix=fix)


# -- loading --------------------------------------------------------------------------------------
def _names(piece: Piece, layers: int) -> list[str]:
    """The file's names of a piece, a layer each."""
    return [piece.name.format(i) for i in range(layers if "{}" in piece.name else 1)]


def _checked(
    entries: Mapping[str, Entry], table: Table, config: GPTConfig, prefix: str
) -> dict[str, Entry]:
    """The entries that the table names. Raises UsageError, ShapeError, DTypeError.

    A folder saved without the head lacks the `prefix` of its names.
    """
    if not any(name.startswith(prefix) for name in entries):
        entries = {n if n == "lm_head.weight" else prefix + n: e for n, e in entries.items()}
    pieces = [p for row in table.values() for p in row]
    want = {name: p.shape for p in pieces for name in _names(p, config.layers)}
    spare = {"lm_head.weight"} if config.tied else set()
    missing = [n for n in want if n not in entries]
    extra = [n for n in entries if n not in want and n not in spare and not COMPUTED.search(n)]
    same_names("load_hf", missing, extra, "load a folder whose config.json belongs to its weights")
    wrong = [(n, shape) for n, shape in want.items() if entries[n].shape != shape]
    if wrong:
        raise fail(
            ShapeError,
            f"load_hf: {len(wrong)} tensors do not have the shape that config.json gives them",
            [(n, f"{entries[n].shape} in the file, {shape} by config.json") for n, shape in wrong],
            fix="load a folder whose config.json belongs to its weights",
        )
    odd = [(n, entries[n].stored) for n in want if entries[n].stored not in STORED]
    if odd:
        raise fail(
            DTypeError,
            f"load_hf: {len(odd)} tensors are stored in a dtype that is not supported",
            odd,
            fix="load a checkpoint whose weights are " + ", ".join(STORED),
        )
    return {n: entries[n] for n in want}


def _placed(
    name: str,
    shape: tuple[int, ...],
    pieces: list[Piece],
    entries: Mapping[str, Entry],
    mesh: Mesh | None,
    strategy: Strategy | None,
    dtype: DType | None,
) -> Tensor:
    """One weight of ours on the devices."""
    stacked = name.startswith(LAYER)
    if dtype is None:
        every = [entries[n].dtype for p in pieces for n in _names(p, shape[0])]
        dtype = every[0]
        for other in every:
            dtype = promote(dtype, other)
    t = plain(dtype, shape, mesh)
    if mesh is not None and strategy is not None:
        t = _whole_heads(name, layout_rule(strategy, "weight")(name, t))

    def fill(parts: Parts) -> None:
        for (block, out), piece in product(parts, pieces):
            if not stacked:
                piece.read(entries[piece.name].get, block, out)
                continue
            layers, inner = block[0], block[1:]
            for i in range(layers.start, layers.stop):
                piece.read(entries[piece.name.format(i)].get, inner, out[i - layers.start])

    return Tensor(engine().place_blocks(fill, t), t)


def _whole_heads(name: str, t: TensorType) -> TensorType:
    """`t` with the heads of keys and values unsplit where they do not divide by the devices."""
    if not re.search(r"\.kv(_bias)?$", name):
        return t
    axes = dim_axes(t.dims[-2])
    return gathered(t, axes) if t.shape[-2] % ways(axes, t.sizes) else t


# -- saving ---------------------------------------------------------------------------------------
def _begun(path: Path) -> Path:
    """A folder in `path` for what is written, until it is whole. Raises UsageError."""
    safetensors_library()
    there = sorted(p.name for p in (path / CONFIG, *path.glob("*.safetensors*")) if p.exists())
    if there:
        whole = "a model already" if CONFIG in there else f"weights without a {CONFIG}"
        raise fail(
            UsageError,
            f"save_hf: {str(path)!r} holds {whole}",
            [("there are", ", ".join(there[:3]))],
            fix="name another folder, or empty this one",
        )
    with file_access("save_hf", path, "written", "name another folder"):
        for old in path.glob(".part-*"):
            if _ended(old.name.removeprefix(".part-")):
                shutil.rmtree(old, ignore_errors=True)
        part = path / f".part-{os.getpid()}"
        part.mkdir(parents=True)
    return part


def _ended(pid: str) -> bool:
    """Whether a save of the process `pid` was killed: one of this process ends before the next."""
    return pid.isdecimal() and (int(pid) == os.getpid() or not Path("/proc", pid).exists())


def _finished(part: Path, path: Path, config: Mapping[str, Any]) -> None:
    """The files of `part` in `path`, config.json last: with it the folder is a model. What is in
    them, and the names of the others, are on the disk before that."""
    with file_access("save_hf", path, "written", "name another folder"):
        write_json(part / CONFIG, config)
        *weights, last = sorted(part.iterdir(), key=lambda p: p.name == CONFIG)
        for file in (*weights, last):
            sync(file)
        for file in weights:
            os.replace(file, path / file.name)
        sync(path)
        os.replace(last, path / CONFIG)
        part.rmdir()
        sync(path)


def _choices(c: GPTConfig) -> dict[str, Any]:
    """What a config says of the weights and what is computed with them."""
    said = asdict(c) | {"kv_heads": c.groups, "hidden": c.width, "head_size": c.size}
    said |= {"norm_eps": c.make_norm().eps, "biases": tuple(sorted(c.biases))}
    said |= {"windows": c.layer_windows, "query_scale": c.query_scale or c.size**-0.5}
    if not c.experts:
        said |= {"experts_per_token": 0, "capacity": None, "aux_weight": 0.0}
    if c.positions != "rotary":
        said.pop("rope")
    return {k: v for k, v in said.items() if k not in EXECUTION}


def _differences(want: GPTConfig, have: GPTConfig) -> list[tuple[str, str]]:
    """Where an architecture that gave `have` cannot say `want`; a bias too many is zeros."""
    a, b = _choices(want), _choices(have)
    if set(a["biases"]) <= set(b["biases"]):
        b["biases"] = a["biases"]
    return [
        (k, f"{a.get(k)!r} here, {b.get(k)!r} there") for k in {**a, **b} if a.get(k) != b.get(k)
    ]


def _described(
    model: GPT, architecture: str | None
) -> tuple[Architecture, dict[str, Any], GPTConfig]:
    """What to write `model` as: the architecture, the content of config.json, what that says."""
    origin = json.loads(model.origin) if model.origin else None
    if origin is not None and architecture in (None, origin["model_type"]):
        known = KNOWN[origin["model_type"]]
        return known, origin, known.read(origin)
    tried = [_architecture(architecture, "save_hf: architecture")] if architecture else None
    rows = []
    for known in tried or KNOWN.values():
        options = known.options(model.config)
        options |= {"model_type": known.kind, "architectures": [known.class_name]}
        try:
            config = known.read(options)
        except UsageError as error:
            rows.append((known.kind, str(error).splitlines()[0].removeprefix("load_hf: ")))
            continue
        wrong = _differences(model.config, config)
        if not wrong:
            return known, options, config
        rows.append((known.kind, "; ".join(f"{k} is {v}" for k, v in wrong)))
    raise fail(
        UsageError,
        "save_hf: the model has choices that the architecture has not",
        rows,
        fix="train a model with the choices of one of them",
    )


def _by_layer(weights: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Our weights under the names of stacked ones: a stack alone, or the weights of all layers."""
    found: dict[str, list[Tensor]] = {}
    for name, t in weights.items():
        if name.startswith(APART):
            name = LAYER + name.removeprefix(APART).partition(".")[2]
        found.setdefault(name, []).append(t)
    return found


def _outgoing(
    weights: Mapping[str, list[Tensor]], table: Table, config: GPTConfig, stacked: bool
) -> dict[str, Outgoing]:
    """The tensors of the files, each put together when it is asked for."""

    @cache
    def host(ours: str, part: int) -> Array | None:
        return to_first(weights[ours][part])

    parts: dict[str, list[tuple[str, int | None, Piece]]] = {}
    for ours, pieces in table.items():
        for piece in pieces:
            for i, name in enumerate(_names(piece, config.layers)):
                layer = i if ours.startswith(LAYER) else None
                parts.setdefault(name, []).append((ours, layer, piece))

    def one(name: str) -> Outgoing:
        rows = parts[name]
        shape = rows[0][2].shape
        there = [weights[ours][0].dtype for ours, _, _ in rows if ours in weights]
        dtype = (there or [weights["embed.weight"][0].dtype])[0].numpy

        def make() -> Array | None:
            there = [row for row in rows if row[0] in weights]  # a bias may not be
            values = [host(ours, 0 if stacked else layer or 0) for ours, layer, _ in there]
            file = np.zeros(shape, dtype)
            for value, (_, layer, piece) in zip(values, there, strict=True):
                if value is None:
                    return None
                piece.write(value if layer is None or not stacked else value[layer], file)
            return file

        return Outgoing(prod(shape) * dtype.itemsize, make)

    return {name: one(name) for name in parts}
