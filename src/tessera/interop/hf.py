"""HuggingFace folders: loading of a model onto a mesh, and saving.

Each device's block of a weight is read from the files separately, so a weight that is split is
never in memory as a whole. Names and layouts in the files are data: `hf_models.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ..core.checks import one_of, same_names, shown
from ..core.context import settings
from ..core.declared import Count, Given
from ..core.dtypes import DType, dtype_of, promote
from ..core.errors import DTypeError, ShapeError, UsageError
from ..core.layout import TensorType, dim_axes, plain, shard_count
from ..core.mesh import Mesh
from ..core.reshard import gathered
from ..lang.parallel.strategy import Strategy, check_reach, layout_rule, strategy_or_none
from ..lang.record.first_process import to_first
from ..lang.value.checks import mesh_or_none, needed_mesh
from ..lang.value.engine import Parts, engine
from ..lang.value.tensor import Tensor
from ..nn.adapters import adapters_of
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
    config_dtype,
    described,
    path_of,
    write_model,
)
from .hf_models import ARCHITECTURES, Architecture
from .hf_names import LAYER, Table
from .hf_torch import of_torch
from .slices import Array, Piece
from .torch_module import TorchModule

# Tensors of older folders besides the weights: masks and rates, which are computed here.
COMPUTED = re.compile(r"\.attn\.(bias|masked_bias)$|\.rotary_emb\.inv_freq$")
SHARD_BYTES = 5 * 2**30
LAYER_PREFIX = "blocks.layers."
"""The prefix of the names of our weights if each layer has its own; its number follows."""


def load_hf(
    folder: str | Path | Any,
    mesh: Mesh | None = None,
    strategy: Strategy | str | None = None,
    dtype: Any = None,
    **config: Any,
) -> GPT:
    """The model of a HuggingFace folder (config.json, safetensors), with weights laid out by
    `strategy`; from a `config.json` alone, or a config of transformers, a model with random
    weights.

    `config` are options of `nn.GPTConfig` that override the folder: `stacked=False` for a pipeline,
    `context="ring"`, `dropout=0.1`, `attention_implementation="sequences"`, ... The supported
    models are GPT-2, GPT-NeoX, Llama, Mistral, Mixtral, Qwen2, Qwen3 (and its experts), Gemma 1 to
    3, Phi, Phi-3 and Falcon. Without `mesh` the current one is used; without either the weights are
    on one device. `dtype` None keeps the dtype of the files; for a config alone it is the config's
    dtype, or f32. If there are fewer heads of keys and values than devices along an axis, each
    device holds all of them. Dropout is applied if `dropout=` asks for it. Random weights are
    created at their first use.

    Raises UsageError if the folder, its model or an option is unknown, options exclude each other
    or tensors are missing; ShapeError or DTypeError if a tensor does not fit the config; MeshError
    if there is a strategy and no mesh; StrategyError if `strategy` is not a strategy.
    """
    mesh = mesh_or_none("load_hf", mesh) or settings().mesh
    want = None if dtype is None else dtype_of(dtype)
    laid_by = _strategy(strategy, mesh)
    raw, path = described(folder)
    architecture = architecture_of(raw.get("model_type"), "load_hf: config.json: model_type")
    if raw.get("quantization_config") is not None:
        raise UsageError(
            "load_hf: config.json: 'quantization_config' is set, which is not supported",
            fix="load a checkpoint that is not quantized",
        )
    for option in config:
        one_of("load_hf", "an option", option, GPTConfig.__dataclass_fields__)
    base = architecture.read(raw)
    said = replace(base, **config)
    model = GPT(said)
    if mesh is not None and laid_by is not None:
        laid = layout_rule(laid_by, "weight")
        types = model.parameters().items()
        check_reach(laid_by, {n: laid(n, plain(t.dtype, t.shape, mesh)) for n, t in types})
    if path is None:
        model.to(want or config_dtype(raw))
        for name, t in model.parameters().items():
            t.type = _laid(name, plain(t.dtype, t.shape, mesh), laid_by)
    else:
        if config:
            _need_same_weights(GPT(replace(base, stacked=said.stacked)), model)
        table = architecture.table(said)
        with Weights(path) as files:
            entries = _checked(files.entries, table, said, architecture.prefix)
            made = {
                name: _placed(name, t.shape, table, entries, mesh, laid_by, want)
                for name, t in model.parameters().items()
            }
        load_with_dtypes(model, made)
    model.origin = json.dumps(raw)
    return model


def save_hf(
    model: Annotated[
        GPT | TorchModule,
        Given("give an nn.GPT or a model of ts.from_torch: save_hf(model, folder)"),
    ],
    folder: str | Path,
    architecture: str | None = None,
    shard_bytes: Count = SHARD_BYTES,
) -> None:
    """Writes `model` as a HuggingFace folder (weights, config.json) that `transformers` loads.

    A model that was loaded from such a folder keeps its architecture and the rest of its config; so
    does a model of transformers that `ts.from_torch` imported, with PyTorch's names of its weights.
    For others `architecture` selects the format ("gpt2", "llama", ...; None: the first that fits).
    Execution options (`stacked`, `context`, `sequence_parallel`, `remat`) are not saved. A bias
    that the architecture has and the model lacks is written as zeros. Weights are gathered to this
    host, file by file of at most `shard_bytes` bytes. All processes must call it, and the first one
    writes; its errors are raised in all. Raises UsageError if the folder holds a model already or
    cannot be written, if the architecture cannot express the model, if experts are in the order of
    a placement, if the model has adapters, or if an imported model is none of transformers.
    """
    path = path_of("save_hf", folder)
    if next(adapters_of(model), None) is not None:
        raise UsageError(
            "save_hf: the model has adapters, which these files cannot hold",
            fix="checkpoint.save_peft(model, folder) writes them; nn.merge_lora(model) adds them to"
            " the weights",
        )
    if isinstance(model, TorchModule):
        tensors, options = of_torch(model, architecture)
    else:
        tensors, options = _of_gpt(model, architecture)
    write_model(f"save_hf {str(path)!r}", path, tensors, options, shard_bytes)


def _of_gpt(model: GPT, architecture: str | None) -> tuple[dict[str, Outgoing], dict[str, Any]]:
    """(the tensors of the files, the content of config.json)."""
    for name, module in model.named_modules():
        if isinstance(module, MoE) and module.placement is not None and module.placed:
            raise UsageError(
                "save_hf: experts lie in the order of a placement",
                layer=name,
                placement=module.placement.text(),
                fix="put each in its own row:"
                f" layer.rehash(nn.place_experts({module.router.shape[-1]}, 1))",
            )
    known, options, config = written_as(model, architecture)
    weights = _by_layer(dict(model.named_parameters(remove_duplicate=False)))
    stored = {"dtype": weights["embed.weight"][0].dtype.numpy.name}
    stored |= {"torch_dtype": stored["dtype"]} if "torch_dtype" in options else {}
    return _outgoing(weights, known.table(config), config, model.config.stacked), {
        **options, **stored,
    }  # fmt: skip


# -- asked at the door ----------------------------------------------------------------------------
def _strategy(strategy: object, mesh: Mesh | None) -> Strategy | None:
    found = strategy_or_none("load_hf", "the strategy", strategy, "tensor_parallel")
    if found is not None:
        needed_mesh("load_hf", mesh)
    return found


def _need_same_weights(base: GPT, model: GPT) -> None:
    """Raises UsageError if options give `model` other weights than those of `base`."""
    before, after = ({n: t.shape for n, t in m.parameters().items()} for m in (base, model))
    wrong = [n for n in {**before, **after} if before.get(n) != after.get(n)]
    if wrong:
        raise UsageError(
            f"load_hf: the options change {len(wrong)} weights that the folder has",
            rows=[
                (n, f"{before.get(n)} in the folder, {after.get(n)} asked for") for n in wrong[:5]
            ],
            fix="leave out options of sizes and weights; random weights of any size come from the"
            f" config alone: load_hf(folder/{CONFIG}, layers=2)",
        )


# -- loading --------------------------------------------------------------------------------------
def _names(piece: Piece, layers: Iterable[int]) -> list[str]:
    """The names of a piece in the files, one per layer."""
    return [piece.name.format(i) for i in (layers if "{}" in piece.name else (0,))]


def _checked(
    entries: Mapping[str, Entry], table: Table, config: GPTConfig, prefix: str
) -> dict[str, Entry]:
    """The entries that the table names. Raises UsageError, ShapeError or DTypeError if they do not
    fit.

    In a folder that was saved without the head, names lack the `prefix`.
    """
    if not any(name.startswith(prefix) for name in entries):
        entries = {n if n == "lm_head.weight" else prefix + n: e for n, e in entries.items()}
    pieces = [p for row in table.values() for p in row]
    want = {name: p.shape for p in pieces for name in _names(p, range(config.layers))}
    spare = {"lm_head.weight"} if config.tied else set()
    missing = [n for n in want if n not in entries]
    extra = [n for n in entries if n not in want and n not in spare and not COMPUTED.search(n)]
    same_names("load_hf", missing, extra, "load a folder whose config.json belongs to its weights")
    wrong = [(n, shape) for n, shape in want.items() if entries[n].shape != shape]
    if wrong:
        raise ShapeError(
            f"load_hf: {len(wrong)} tensors do not have the shape that config.json gives them",
            rows=[
                (n, f"{entries[n].shape} in the file, {shape} by config.json") for n, shape in wrong
            ],
            fix="load a folder whose config.json belongs to its weights",
        )
    odd = [(n, entries[n].stored) for n in want if entries[n].stored not in STORED]
    if odd:
        raise DTypeError(
            f"load_hf: {len(odd)} tensors are stored in a dtype that is not supported",
            rows=odd,
            fix="load a checkpoint whose weights are " + ", ".join(STORED),
        )
    return {n: entries[n] for n in want}


def _placed(
    name: str,
    shape: tuple[int, ...],
    table: Table,
    entries: Mapping[str, Entry],
    mesh: Mesh | None,
    strategy: Strategy | None,
    dtype: DType | None,
) -> Tensor:
    """One of our weights on the devices."""
    ours, layer = _stacked_name(name)
    pieces, stacked = table[ours], ours.startswith(LAYER) and layer is None
    if dtype is None:
        layers = range(shape[0]) if layer is None else (layer,)
        every = [entries[n].dtype for p in pieces for n in _names(p, layers)]
        dtype = every[0]
        for other in every:
            dtype = promote(dtype, other)
    t = _laid(name, plain(dtype, shape, mesh), strategy)

    def fill(parts: Parts) -> None:
        for (block, out), piece in product(parts, pieces):
            if not stacked:
                piece.read(entries[piece.name.format(layer)].get, block, out)
                continue
            layers, inner = block[0], block[1:]
            for i in range(layers.start, layers.stop):
                piece.read(entries[piece.name.format(i)].get, inner, out[i - layers.start])

    return Tensor(engine().place_blocks(fill, t), t)


def _stacked_name(name: str) -> tuple[str, int | None]:
    """(name of a weight as in a stack, its layer; None for a weight of all layers)."""
    if not name.startswith(LAYER_PREFIX):
        return name, None
    layer, _, rest = name.removeprefix(LAYER_PREFIX).partition(".")
    return LAYER + rest, int(layer)


def _laid(name: str, t: TensorType, strategy: Strategy | None) -> TensorType:
    """`t` in the layout of `strategy`, with the heads of keys and values unsplit if the devices do
    not divide them."""
    if t.mesh is None or strategy is None:
        return t
    t = layout_rule(strategy, "weight")(name, t)
    if not re.search(r"\.kv(_bias)?$", name):
        return t
    axes = dim_axes(t.dims[-2])
    return gathered(t, axes) if t.shape[-2] % shard_count(axes, t.sizes) else t


# -- saving ---------------------------------------------------------------------------------------
def _by_layer(weights: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Our weights by the names of stacked ones: a stack alone, or the weights of all layers."""
    found: dict[str, list[Tensor]] = {}
    for name, t in weights.items():
        found.setdefault(_stacked_name(name)[0], []).append(t)
    return found


def _outgoing(
    weights: Mapping[str, list[Tensor]], table: Table, config: GPTConfig, stacked: bool
) -> dict[str, Outgoing]:
    """The tensors of the files, each assembled on request."""

    @cache
    def host(ours: str, part: int) -> Array | None:
        return to_first(weights[ours][part])

    parts: dict[str, list[tuple[str, int | None, Piece]]] = {}
    for ours, pieces in table.items():
        for piece in pieces:
            for i, name in enumerate(_names(piece, range(config.layers))):
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


# Choice of the architecture that a model is saved as: its origin, or one that expresses its
# config.

# Fields of a config about training and execution, not computation.
EXECUTION = (
    "dropout", "loop", "remat", "stacked", "context", "context_axis", "sequence_parallel",
    "attention_implementation",
)  # fmt: skip


def architecture_of(name: object, argument: str) -> Architecture:
    """The architecture with that `model_type`. Raises UsageError if there is none."""
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    fix = "known: " + ", ".join(ARCHITECTURES)
    if name in ("deepseek_v2", "deepseek_v3"):
        fix += "; of DeepSeek's the latent attention (MLA) is missing, its experts are nn.MoE's"
    raise UsageError(f"{argument} {shown(name)} is not known", fix=fix)


def _choices(c: GPTConfig) -> dict[str, Any]:
    """The fields of a config that affect weights and computation, in a normal form."""
    said = asdict(c) | {"kv_heads": c.groups, "hidden": c.width, "head_size": c.size}
    said |= {"norm_eps": c.make_norm().eps, "biases": tuple(sorted(c.biases))}
    said |= {"windows": c.layer_windows, "query_scale": c.query_scale or c.size**-0.5}
    if not c.experts:
        said |= {"experts_per_token": 0, "capacity": None, "aux_weight": 0.0}
    if c.positions != "rotary":
        said.pop("rope")
    return {k: v for k, v in said.items() if k not in EXECUTION}


def _differences(want: GPTConfig, config: GPTConfig) -> list[tuple[str, str]]:
    """(field, difference) where an architecture that gives the config `config` cannot express
    `want`; an extra bias counts as zeros."""
    a, b = _choices(want), _choices(config)
    if set(a["biases"]) <= set(b["biases"]):
        b["biases"] = a["biases"]
    return [
        (k, f"{a.get(k)!r} here, {b.get(k)!r} there") for k in {**a, **b} if a.get(k) != b.get(k)
    ]


def written_as(
    model: GPT, architecture: str | None
) -> tuple[Architecture, dict[str, Any], GPTConfig]:
    """(architecture that `model` is saved as, content of config.json, its config)."""
    origin = json.loads(model.origin) if model.origin else {}
    if origin and architecture in (None, origin["model_type"]):
        candidate = ARCHITECTURES[origin["model_type"]]
        config = candidate.read(origin)
        if not _differences(model.config, config):
            return candidate, origin, config
        architecture = candidate.kind  # options of `load_hf` changed something of it
    else:
        origin = {}
    tried = [architecture_of(architecture, "save_hf: architecture")] if architecture else None
    rows = []
    for candidate in tried or ARCHITECTURES.values():
        options = {**origin, **candidate.options(model.config)}
        options |= {"model_type": candidate.kind, "architectures": [candidate.class_name]}
        try:
            config = candidate.read(options)
        except UsageError as error:
            rows.append((candidate.kind, str(error).splitlines()[0].removeprefix("load_hf: ")))
            continue
        wrong = _differences(model.config, config)
        if not wrong:
            return candidate, options, config
        rows.append((candidate.kind, "; ".join(f"{k} is {v}" for k, v in wrong)))
    raise UsageError(
        "save_hf: the model has choices that the architecture has not",
        rows=rows,
        fix="train a model with the choices of one of them",
    )
