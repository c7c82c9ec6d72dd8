"""The architecture as which a model of ours is written: that which it came from, or one that says
all that it computes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from ..core.checks import shown
from ..core.errors import UsageError
from ..nn.gpt_config import GPTConfig
from ..nn.transformer import GPT
from .hf_models import KNOWN, Architecture

# Fields of a config that say how a model is trained and run, not what it computes.
EXECUTION = (
    "dropout", "loop", "remat", "stacked", "context", "context_axis", "sequence_parallel",
    "attention_implementation",
)  # fmt: skip


def architecture_of(name: object, what: str) -> Architecture:
    """The architecture of that `model_type`. Raises UsageError."""
    if isinstance(name, str) and name in KNOWN:
        return KNOWN[name]
    fix = "known: " + ", ".join(KNOWN)
    if name in ("deepseek_v2", "deepseek_v3"):
        fix += "; of DeepSeek's the latent attention (MLA) is missing, its experts are nn.MoE's"
    raise UsageError(f"{what} {shown(name)} is not known", fix=fix)


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


def written_as(
    model: GPT, architecture: str | None
) -> tuple[Architecture, dict[str, Any], GPTConfig]:
    """(the architecture that `model` is written as, the content of config.json, its options)."""
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
