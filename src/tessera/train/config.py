"""`TrainingConfig`, the table of configuration keys; one error lists all that is wrong.

A configuration is a plain dict; missing keys have the defaults of `TrainingConfig` (guide 4, "Basic
Training Setup", names the first nine keys).

>>> c = checked({"learning_rate": 1e-3, "d_model": 64})
>>> c.learning_rate, c.hidden_size, c.compute
(0.001, 64, None)
>>> checked({"lerning_rate": 1, "warmup_steps": -1, "mixed_precision": "fp8"})
Traceback (most recent call last):
tessera.UsageError: config: 3 keys are wrong
  lerning_rate    : is not known; did you mean learning_rate?
  warmup_steps    : -1 is not a whole number of at least 0
  mixed_precision : 'fp8' is not True, False, "bf16" or "fp16"
  fix             : correct them, or leave them out for the defaults
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..checkpoint import Keep
from ..core.checks import mapping, shown
from ..core.dtypes import DType, bf16, f16
from ..core.errors import UsageError
from ..core.peers import fix_for
from ..core.value_checks import FLAG, Kind, choices, is_list, numbers, or_none, whole_numbers
from ..data import config as data
from ..nn.gpt_config import GPTConfig

COUNT = whole_numbers(1)
STEPS = whole_numbers(0)
SEED = whole_numbers(0, 2**32 - 1)
NOT_NEGATIVE = numbers(least=0, below=math.inf)
POSITIVE = numbers(above=0, below=math.inf)
PART = numbers(least=0, below=1)
PRECISION = choices(True, False, "bf16", "fp16")
CHECKPOINTING = choices(True, False, "save", "recompute", "products")
TEXT: Kind = ("a string that is not empty", lambda x: isinstance(x, str) and x != "")
PAIR: Kind = ("two numbers of at least 0 and below 1", lambda x: is_list(x, PART[1], 2))
SCALE: Kind = (
    f'None, "dynamic" or {POSITIVE[0]}',
    lambda x: choices(None, "dynamic")[1](x) or POSITIVE[1](x),
)


def _key(default: Any, rule: Kind, description: str) -> Any:
    return field(default=default, metadata={"rule": rule, "what": description})


@dataclass(frozen=True)
class TrainingConfig:
    """A checked configuration: frozen, so it may be a static argument of a compiled function."""

    # The model.
    vocab_size: int = _key(1024, COUNT, "tokens that the model knows")
    hidden_size: int = _key(256, COUNT, "width of the residual stream; also `d_model`")
    num_layers: int = _key(4, COUNT, "transformer blocks")
    num_heads: int = _key(8, COUNT, "attention heads; divides `hidden_size`")
    num_kv_heads: int | None = _key(None, or_none(COUNT), "key and value heads; None: `num_heads`")
    intermediate_size: int | None = _key(None, or_none(COUNT), "width of the MLP; None: 4 x hidden")
    norm: str = _key("layer", choices("layer", "rms"), "kind of norm")
    activation: str = _key("gelu", choices("gelu", "swiglu"), "kind of MLP")
    positions: str = _key("learned", choices("learned", "rotary"), "kind of position embedding")
    tie_embeddings: bool = _key(False, FLAG, "the embedding is the output head too")
    dropout: float = _key(0.0, PART, "part of each sublayer's output set to zero")
    seed: int = _key(0, SEED, "decides initial weights, dropout and the order of the data")
    # The data.
    batch_size: int = _key(32, COUNT, "sequences in a batch; a loader on a mesh: on one device")
    sequence_length: int = _key(256, COUNT, "tokens in a sequence")
    # The optimizer.
    optimizer: str = _key(
        "adamw",
        choices("adamw", "adam", "sgd", "momentum", "lion", "adafactor"),
        "rule of the update",
    )
    learning_rate: float = _key(3e-4, NOT_NEGATIVE, "the rate at the end of the warm-up")
    min_learning_rate: float = _key(0.0, NOT_NEGATIVE, "the rate at `total_steps`")
    schedule: str = _key(
        "cosine", choices("cosine", "linear", "inverse_sqrt", "constant"), "decay after the warm-up"
    )
    warmup_steps: int = _key(0, STEPS, "steps over which the rate rises in a straight line")
    total_steps: int = _key(1000, COUNT, "steps after which the rate has fallen; the loop's length")
    betas: tuple[float, float] = _key((0.9, 0.95), PAIR, "decay of Adam's and Lion's two moments")
    eps: float = _key(1e-8, POSITIVE, "added to the root of Adam's second moment")
    momentum: float = _key(0.9, PART, "decay of the trace of `momentum`")
    weight_decay: float = _key(0.01, NOT_NEGATIVE, "pull of matrices towards zero (not of norms)")
    gradient_clip_norm: float = _key(1.0, NOT_NEGATIVE, "largest global gradient norm; 0: any")
    accumulation_steps: int = _key(1, COUNT, "microbatches in a batch, one after the other")
    # Precision.
    mixed_precision: bool | str = _key(False, PRECISION, "products in bf16 (True) or fp16")
    weight_dtype: str = _key("f32", choices("f32", "bf16", "f16"), "dtype of weights; f32 masters")
    reduce_dtype: str | None = _key(
        None, choices(None, "f32", "bf16", "f16"), "dtype of gradients' sums over devices"
    )
    loss_scale: float | str | None = _key(
        None, SCALE, 'factor of the loss; None: "dynamic" for fp16, else 1'
    )
    loss_scale_interval: int = _key(2000, COUNT, "good steps after which a dynamic scale doubles")
    # Memory.
    gradient_checkpointing: bool | str = _key(False, CHECKPOINTING, "what the backward recomputes")
    offload_optimizer_state: bool = _key(False, FLAG, "optimizer state waits in host memory")
    # Files.
    checkpoint_folder: str = _key("checkpoints", TEXT, "where `save_checkpoint` writes")
    keep_checkpoints: int | None = _key(None, or_none(COUNT), "newest checkpoints kept; None: all")
    keep_every: int | None = _key(None, or_none(COUNT), "those whose step it divides are kept, too")
    keep_best: int = _key(0, STEPS, "checkpoints kept, too, for the smallest `keep_metric`")
    keep_metric: str = _key("loss", TEXT, "metric of `save_checkpoint` by which they are best")

    @property
    def keep(self) -> Keep | None:
        """The policy of which checkpoints to keep; None: all."""
        if self.keep_checkpoints is None:
            return None
        return Keep(self.keep_checkpoints, self.keep_every, self.keep_best, self.keep_metric)

    @property
    def compute(self) -> DType | None:
        """The dtype of products; None: the dtype of their operands."""
        return {"fp16": f16, "bf16": bf16, True: bf16}.get(self.mixed_precision)

    @property
    def scaled(self) -> bool:
        """Returns whether the loss is multiplied by a scale."""
        return self.loss_scale is not None or self.mixed_precision == "fp16"

    @property
    def dynamic(self) -> bool:
        """Returns whether the loss scale is dynamic."""
        return self.scaled and (self.loss_scale is None or self.loss_scale == "dynamic")

    @property
    def remat(self) -> bool | str:
        """The policy of `nn.GPTConfig.remat`."""
        chosen = self.gradient_checkpointing
        return False if chosen in (False, "save") else chosen

    def model(self) -> GPTConfig:
        """The sizes of the model."""
        return GPTConfig(
            vocab=self.vocab_size, seq=self.sequence_length, d=self.hidden_size,
            layers=self.num_layers, heads=self.num_heads, kv_heads=self.num_kv_heads,
            hidden=self.intermediate_size, norm=self.norm, activation=self.activation,
            positions=self.positions, tied=self.tie_embeddings, dropout=self.dropout,
            remat=self.remat,
        )  # fmt: skip


KEYS = {f.name: f for f in fields(TrainingConfig)}
ALIASES = {"d_model": "hidden_size", "num_attention_heads": "num_heads"}
# Keys that other parts read: the loaders (data/config.py) and the state of `adam_optimizer`.
OTHERS = (*(key for key in data.KEYS if key not in KEYS), "optimizer_state")


def checked(config: TrainingConfig | Mapping[str, Any]) -> TrainingConfig:
    """`config` with defaults filled in. Raises UsageError, which lists every key that is wrong."""
    if isinstance(config, TrainingConfig):
        return config
    mapping("config", "it", config, 'give a dict, e.g. {"learning_rate": 1e-4}')
    values: dict[str, Any] = {}
    by: dict[str, str] = {}  # name → the key as it was given
    wrong: list[tuple[str, str]] = []
    for key, value in config.items():
        name = ALIASES.get(key, key) if isinstance(key, str) else key
        if name in by:
            wrong.append((str(key), f"says what {by[name]!r} says too: leave out one of them"))
        elif name in KEYS:
            by[name] = key
            rule, fits = KEYS[name].metadata["rule"]
            values[name] = value.item() if isinstance(value, np.generic) else value  # a file's
            if not fits(value):
                wrong.append((key, f"{shown(value)} is not {rule}"))
        elif name in OTHERS:
            legal, good = data.LEGAL.get(name, ("", lambda _: True))
            if not good(value):
                wrong.append((key, f"{shown(value)} is not {legal}"))
        else:
            near = _instead(str(key))
            wrong.append((str(key), "is not known" + (f"; did you mean {near}?" if near else "")))
    if not wrong:
        values["betas"] = tuple(map(float, values.get("betas", TrainingConfig.betas)))
        config_checked = TrainingConfig(**values)
        wrong = _together(config_checked)
        if not wrong:
            return config_checked
    raise UsageError(
        f"config: {len(wrong)} key{'s are' if len(wrong) > 1 else ' is'} wrong",
        rows=wrong,
        fix="correct them, or leave them out for the defaults",
    )


def _instead(key: str) -> str:
    """The place of the setting `key` elsewhere (nn.GPTConfig, an optimizer, a peer library), or
    else the most similar key; "" if there is none."""
    for name in (key, *fix_for("arguments", key)):
        if found := fix_for("training", name):
            return str(found)
    near = difflib.get_close_matches(key, [*KEYS, *ALIASES, *OTHERS], 1)
    return near[0] if near else ""


def _together(c: TrainingConfig) -> list[tuple[str, str]]:
    """(key, problem) of values that are valid alone but not together."""
    kv = c.num_kv_heads or c.num_heads
    problems = [
        (c.hidden_size % c.num_heads, "num_heads", f"{c.num_heads} does not divide hidden_size"),
        (c.num_heads % kv, "num_kv_heads", f"{kv} does not divide num_heads"),
        (
            c.batch_size % c.accumulation_steps,
            "accumulation_steps",
            f"{c.accumulation_steps} does not divide batch_size {c.batch_size}",
        ),
        (
            c.warmup_steps >= c.total_steps,
            "warmup_steps",
            f"{c.warmup_steps} is not below total_steps {c.total_steps}",
        ),
        (
            c.min_learning_rate > c.learning_rate,
            "min_learning_rate",
            f"{c.min_learning_rate} is above learning_rate {c.learning_rate}",
        ),
        *(
            (
                c.keep_checkpoints is None and getattr(c, key),
                key,
                "says what stays besides the newest: say how many, keep_checkpoints",
            )
            for key in ("keep_every", "keep_best")
        ),
    ]
    return [(name, why) for bad, name, why in problems if bad]


__all__ = ["KEYS", "TrainingConfig", "checked"]
