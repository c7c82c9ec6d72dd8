"""PEFT's folders of LoRA adapters: adapter_config.json and adapter_model.safetensors.

A file has, for each matrix, lora_A [r, in] and lora_B [out, r] under the name of its module in the
base model. For an `nn.GPT` these are the names of the HuggingFace folder that `save_hf` writes; for
other modules, such as those of `ts.from_torch`, their own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ..core.checks import file_access, same_names
from ..core.declared import Given
from ..core.errors import ShapeError, UsageError
from ..lang.math.create import tensor
from ..lang.record.first_process import by_first, to_first
from ..nn.adapters import Adapter, adapters_of, add, places
from ..nn.module import Module
from ..nn.transformer import GPT
from .hf import _stacked_name, written_as
from .hf_files import path_of, read_json, safetensors_library, write_json
from .slices import Array

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
AS_HERE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False,), "modules_to_save": (),
    "alpha_pattern": (), "trainable_token_indices": (), "lora_bias": (False,),
    "use_qalora": (False,), "use_bdlora": (False,), "target_parameters": (), "arrow_config": (),
    "layer_replication": (), "alora_invocation_tokens": (), "kasa_config": (),
    "monteclora_config": (), "velora_config": (), "megatron_config": (),
    # others change the base's weights too
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}  # fmt: skip
"""Keys of adapter_config.json that change what is computed, with the supported values beside null
and empty ones."""


@dataclass(frozen=True, slots=True)
class Place:
    """An adapter of one of our modules, and the names of its modules in a file, layer by layer."""

    module: Module
    adapter: Adapter
    files: tuple[str, ...]

    @property
    def weight(self) -> Any:
        return vars(self.module)[self.adapter.weight]


def load_peft(
    model: Annotated[Module, Given("give the model, then the folder: load_peft(model, folder)")],
    folder: str | Path,
) -> Module:
    """Adds the LoRA adapters in PEFT's `folder` to `model`, and freezes all other parameters.
    Returns `model`.

    `model` is an `nn.GPT`, such as `load_hf` gives for the adapter's base model, or any module
    whose matrices have the names in the file, such as that of `ts.from_torch`. Dropout of adapters
    is not applied in training. Raises UsageError if the folder cannot be read, has a kind of
    adapter that is not supported, or names matrices that the model has not; ShapeError if one does
    not fit.
    """
    path = path_of("load_peft", folder)
    config = read_json(path / CONFIG, "load_peft", f"{CONFIG} and {WEIGHTS}")
    _supported(config)
    if next(adapters_of(model), None) is not None:
        raise UsageError(
            "load_peft: the model has adapters already",
            fix="merge them first: nn.merge_lora(model)",
        )
    # PEFT also writes the base's weight of a head or an embedding that has an adapter.
    values = {n: v for n, v in _read(path).items() if ".base_layer." not in n}
    pairs = {n.removesuffix(".lora_A.weight") for n in values if n.endswith(".lora_A.weight")}
    every = [p for p in _places(model) if pairs & {*p.files}]
    known = {f"{f}.lora_{x}.weight" for p in every for f in p.files for x in "AB"}
    same_names("load_peft", sorted(known - {*values}), sorted({*values} - known),
               "give the model that the adapters were trained for")  # fmt: skip
    for p in every:
        _check(p, values)
    model.freeze()
    for p in every:
        r = values[f"{p.files[0]}.lora_A.weight"].shape[0]
        root = math.sqrt(r) if config.get("use_rslora") else r
        adapter = replace(p.adapter, scale=float(config.get("lora_alpha", 8)) / root)
        add(p.module, adapter, r)
        a, b = _joined(p, values, r)
        for name, value in ((adapter.a, a), (adapter.b, b)):
            box = vars(p.module)[name]
            box.put(tensor(value, mesh=box.mesh))
    model.parameters()
    return model


def save_peft(
    model: Annotated[Module, Given("give the model, then the folder: save_peft(model, folder)")],
    folder: str | Path,
) -> None:
    """Writes the adapters of `model` as a folder that PEFT loads: `PeftModel.from_pretrained(base,
    folder)`.

    All processes must call it, and the first one writes. Raises UsageError if there is no adapter,
    if adapters differ in rank or alpha, if the base's files hold their matrix fused with others, or
    if the folder cannot be written or has adapters already.
    """
    path = path_of("save_peft", folder)
    have = {(id(m), a.name): a for _, m, a in adapters_of(model)}
    if not have:
        raise UsageError("save_peft: the model has no adapter", fix="add them: nn.lora(model, r=8)")
    found = [
        replace(p, adapter=have[id(p.module), p.adapter.name])
        for p in _places(model)
        if (id(p.module), p.adapter.name) in have
    ]
    if len(found) < len(have):
        raise UsageError(
            "save_peft: the base's files hold an adapter's matrix fused with others",
            fix="merge the adapters, and save the model: nn.merge_lora(model), save_hf",
        )
    kinds = {(vars(p.module)[p.adapter.a].shape[-1], p.adapter.scale) for p in found}
    if len(kinds) > 1:
        raise UsageError(
            "save_peft: adapters differ in rank or alpha",
            adapters="; ".join(f"r={r}, alpha={r * s:g}" for r, s in sorted(kinds)),
            fix="give all the same: nn.lora(model, r=8, alpha=16.0)",
        )
    ((r, scale),) = kinds
    tensors: dict[str, Array] = {}
    for p in found:
        a, b = (to_first(vars(p.module)[n]) for n in (p.adapter.a, p.adapter.b))
        if a is not None and b is not None:
            tensors |= _separate(p, a, b)
    names = sorted(f.removeprefix(PREFIX) for p in found for f in p.files)
    config = {
        "peft_type": "LORA", "r": r, "lora_alpha": r * scale, "target_modules": names,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": _joined_files(model),
        "base_model_name_or_path": None, "inference_mode": True, "use_rslora": False,
        "task_type": "CAUSAL_LM" if isinstance(model, GPT) else None,
    }  # fmt: skip
    by_first("save_peft", lambda: _write(path, config, tensors))


# -- names ----------------------------------------------------------------------------------------
def _places(model: Module) -> Iterator[Place]:
    """The matrices of `model` that can be in a file. For an `nn.GPT` those whose tensor in the file
    holds nothing else."""
    if not isinstance(model, GPT):
        for name, module, adapter in places(model):
            if not adapter.lead:
                yield Place(module, adapter, (PREFIX + name,))
        return
    known, _, config = written_as(model, None)
    table = known.table(config)
    for name, module, adapter in places(model):
        prefix = name.rpartition(".")[0]
        ours, layer = _stacked_name(f"{prefix}.{adapter.weight}" if prefix else adapter.weight)
        for piece in table.get(ours, ()):
            at = [int(c) for c in piece.ours if c.isdigit()]
            if piece.places is not None or at != ([] if adapter.part is None else [adapter.part]):
                continue
            layers = range(config.layers) if adapter.lead else (layer or 0,)
            files = tuple(PREFIX + piece.name.format(i).removesuffix(".weight") for i in layers)
            yield Place(module, adapter, files)


def _joined_files(model: Module) -> bool:
    """Returns whether the base's files hold matrices as [in, out]."""
    return isinstance(model, GPT) and written_as(model, None)[0].kind == "gpt2"


# -- values ---------------------------------------------------------------------------------------
def _joined(p: Place, values: Mapping[str, Array], r: int) -> tuple[Array, Array]:
    """A and B of our adapter from the matrices of the file."""
    lead, come, go = p.adapter.shapes(p.weight)
    a = np.stack([values[f"{f}.lora_A.weight"].astype(np.float32).T for f in p.files])
    b = np.stack([values[f"{f}.lora_B.weight"].astype(np.float32).T for f in p.files])
    return a.reshape(*lead, *come, r), b.reshape(*lead, r, *go)


def _separate(p: Place, a: Array, b: Array) -> dict[str, Array]:
    """The matrices of the file from A and B of our adapter."""
    r, count = a.shape[-1], len(p.files)
    made = {}
    for f, x, y in zip(p.files, a.reshape(count, -1, r), b.reshape(count, r, -1), strict=True):
        made[f"{f}.lora_A.weight"] = np.ascontiguousarray(x.T)
        made[f"{f}.lora_B.weight"] = np.ascontiguousarray(y.T)
    return made


def _check(p: Place, values: Mapping[str, Array]) -> None:
    _, come, go = p.adapter.shapes(p.weight)
    r = values[f"{p.files[0]}.lora_A.weight"].shape[0]
    for f in p.files:
        for x, want in (("A", (r, math.prod(come))), ("B", (math.prod(go), r))):
            name = f"{f}.lora_{x}.weight"
            if values[name].shape != want:
                raise ShapeError(
                    f"load_peft: {name!r} does not fit the model",
                    rows=[("file", str(values[name].shape)), ("model", str(want))],
                    fix="give the model that the adapters were trained for",
                )


# -- files ----------------------------------------------------------------------------------------
def _supported(config: Mapping[str, Any]) -> None:
    for key, values in AS_HERE.items():
        value = config.get(key)
        if value and value not in values:
            raise UsageError(
                f"load_peft: {CONFIG}: {key!r} is {value!r}, which is not supported",
                fix="merge it with PEFT: model.merge_and_unload(), and load the result",
            )


def _read(path: Path) -> dict[str, Array]:
    safetensors = safetensors_library()
    try:
        with file_access("load_peft", path / WEIGHTS, "read", f"give a folder with {WEIGHTS}"):
            found: dict[str, Array] = safetensors.numpy.load_file(path / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise UsageError(
            f"load_peft: {str(path / WEIGHTS)!r} cannot be read: {error}", fix="save it anew"
        ) from None
    return found


def _write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
    """Writes the folder, the config last: it makes the folder one of adapters."""
    fix = "name another folder"
    with file_access("save_peft", path, "written", fix):
        if (path / CONFIG).exists():
            raise UsageError(f"save_peft: {str(path)!r} holds adapters already", fix=fix)
        path.mkdir(parents=True, exist_ok=True)
        part = path / f".part-{os.getpid()}"
        safetensors_library().numpy.save_file(dict(tensors), part, metadata={"format": "pt"})
        os.replace(part, path / WEIGHTS)
        write_json(part, config)
        os.replace(part, path / CONFIG)


__all__ = ["load_peft", "save_peft"]
