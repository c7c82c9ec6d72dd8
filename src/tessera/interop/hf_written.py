"""Choice of the architecture that a model is saved as: its origin, or one that expresses its
config."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ..core.checks import shown
from ..core.errors import UsageError
from ..nn.gpt_config import GPTConfig
from ..nn.transformer import GPT
from .hf_models import KNOWN, Architecture

# Fields of a config about training and execution, not computation.
EXECUTION = (
    "dropout", "loop", "remat", "stacked", "context", "context_axis", "sequence_parallel",
    "attention_implementation",
)  # fmt: skip


def architecture_of(name: object, what: str) -> Architecture:
    """The architecture with that `model_type`. Raises UsageError if there is none."""
    if isinstance(name, str) and name in KNOWN:
        return KNOWN[name]
    fix = "known: " + ", ".join(KNOWN)
    if name in ("deepseek_v2", "deepseek_v3"):
        fix += "; of DeepSeek's the latent attention (MLA) is missing, its experts are nn.MoE's"
    raise UsageError(f"{what} {shown(name)} is not known", fix=fix)


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


def _differences(want: GPTConfig, have: GPTConfig) -> list[tuple[str, str]]:
    """(field, difference) where an architecture that gives the config `have` cannot express `want`;
    an extra bias counts as zeros."""
    a, b = _choices(want), _choices(have)
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
        known = KNOWN[origin["model_type"]]
        config = known.read(origin)
        if not _differences(model.config, config):
            return known, origin, config
        architecture = known.kind  # options of `load_hf` changed something of it
    else:
        origin = {}
    tried = [architecture_of(architecture, "save_hf: architecture")] if architecture else None
    rows = []
    for known in tried or KNOWN.values():
        options = {**origin, **known.options(model.config)}
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
    raise UsageError(
        "save_hf: the model has choices that the architecture has not",
        rows=rows,
        fix="train a model with the choices of one of them",
    )
