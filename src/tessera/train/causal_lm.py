"""Causal language models of a HuggingFace config, to be trained: as `nn.GPT` where `load_hf` takes
the config, else as transformers' model, imported by `ts.from_torch`.

>>> small = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1,
...          "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32}
>>> lm = causal_lm(Described(small), rows=2, seq=8, seed=0)
>>> lm.name, lm.has_choices
('llama as nn.GPT', True)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..core.checks import library, whole
from ..core.errors import UsageError
from ..core.mesh import Mesh
from ..interop.hf import load_hf
from ..interop.hf_files import CONFIG, INDEX, WEIGHTS, described
from ..interop.hf_models import ARCHITECTURES
from ..interop.torch_export import torch_library
from ..interop.torch_module import TorchModule, from_torch, part_at
from ..lang.math import random
from ..lang.math.create import first_values
from ..lang.parallel.strategy import Strategy, place
from ..lang.value.tensor import Tensor
from ..nn.losses import cross_entropy
from ..nn.module import Module
from ..nn.transformer import GPT


@dataclass(frozen=True)
class Described:
    """The content of a config.json, its folder, and whether weights are there too."""

    raw: Mapping[str, Any]
    folder: Path = Path()
    has_weights: bool = False

    @staticmethod
    def read(source: Path) -> Described:
        """Reads a config.json, or a folder with one. Raises UsageError if it cannot be read."""
        raw, folder = described(source)
        has_weights = folder is not None and any((folder / f).exists() for f in (WEIGHTS, INDEX))
        return Described(raw, folder or source.parent, has_weights)


class CausalLM(Protocol):
    """A model to be trained. `has_choices`: it takes the choices `remat` and `sequence_parallel` of
    `ts.plan.best`."""

    name: str
    has_choices: bool

    def sketch(self, mesh: Mesh, strategy: Strategy, **choices: Any) -> Module:
        """The model with weights that are recipes, for plans."""

    def model(self, mesh: Mesh, strategy: Strategy, **choices: Any) -> Module:
        """The model with its weights."""

    def loss(self, model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss, f32[], of `ids` and `labels` [rows, seq]."""


class Known:
    """A model that `load_hf` makes."""

    has_choices = True

    def __init__(self, source: Described, seed: int) -> None:
        self.source, self.seed = source, seed
        self.name = f"{source.raw['model_type']} as nn.GPT"

    def sketch(self, mesh: Mesh, strategy: Strategy, **choices: Any) -> Module:
        return load_hf(self.source.raw, mesh, strategy, "f32", **choices)

    def model(self, mesh: Mesh, strategy: Strategy, **choices: Any) -> Module:
        random.seed(self.seed)
        source = self.source.folder if self.source.has_weights else self.source.raw
        return load_hf(source, mesh, strategy, "f32", **choices)

    def loss(self, model: GPT, ids: Tensor, labels: Tensor) -> Tensor:
        return model.loss(ids, labels)


class Imported:
    """A model of transformers, exported for [rows, seq] in training mode. Dropout is that of the
    config, and the weights are f32."""

    has_choices = False

    def __init__(self, source: Described, rows: int, seq: int, seed: int) -> None:
        peer = _of_transformers(source, seed).float().train()
        self.name = f"{source.raw['model_type']} as {type(peer).__name__} of transformers"
        self.seed = seed
        example = {"input_ids": torch_library().zeros(rows, seq).long(), "use_cache": False}
        self.imported: TorchModule = from_torch(peer, (), example)
        self.empty = copy.deepcopy(self.imported)
        self.empty.load_parameters({n: _empty(t) for n, t in self.empty.parameters().items()})
        for name, t in self.empty.named_buffers():
            path, _, last = name.rpartition(".")
            setattr(part_at(self.empty, path), last, _empty(t))

    def sketch(self, mesh: Mesh, strategy: Strategy, **choices: Any) -> Module:
        found: Module = place(copy.deepcopy(self.empty), strategy, mesh)
        return found

    def model(self, mesh: Mesh, strategy: Strategy, **choices: Any) -> Module:
        random.seed(self.seed)
        found: Module = place(self.imported, strategy, mesh)
        return found

    def loss(self, model: TorchModule, ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(input_ids=ids, use_cache=False)["logits"], labels)


def causal_lm(source: Described, rows: int, seq: int, seed: int) -> CausalLM:
    """The model of `source` for batches of `rows` rows of `seq` tokens; `seed` decides its first
    weights. Raises UsageError if neither `load_hf` nor transformers makes it."""
    kind = source.raw.get("model_type")
    most = source.raw.get("max_position_embeddings") or source.raw.get("n_positions")
    if isinstance(most, int):
        whole("train", "--seq", seq, 1, most)
    if isinstance(kind, str) and kind in ARCHITECTURES:
        try:
            ARCHITECTURES[kind].read(source.raw)
        except UsageError:
            pass  # an option that nn.GPT does not have
        else:
            return Known(source, seed)
    return Imported(source, rows, seq, seed)


def _empty(t: Tensor) -> Tensor:
    """A tensor of the type of `t` that is a recipe."""
    empty = Tensor(None, t.type)
    empty.wait(first_values("train", "zeros", ""))
    return empty


def _of_transformers(source: Described, seed: int) -> Any:
    """The model of transformers. Raises UsageError in its words if it makes none."""
    library("train", "torch", "train").manual_seed(seed)
    transformers = library("train", "transformers", "train")
    auto = transformers.AutoModelForCausalLM
    options = {k: v for k, v in source.raw.items() if k != "model_type"}
    try:
        if source.has_weights:
            return auto.from_pretrained(source.folder)
        return auto.from_config(
            transformers.AutoConfig.for_model(source.raw.get("model_type"), **options)
        )
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise UsageError(
            "train: transformers makes no causal language model of it",
            model_type=source.raw.get("model_type"),
            transformers=first,
            fix=f"give the {CONFIG} of one, or a folder with it and its weights",
        ) from None


__all__ = ["CausalLM", "Described", "causal_lm"]
