"""Functions of a training script; weights and optimizer state are dicts of tensors.

They have the names that guide 4 uses: thin functions over `nn.GPT` and `optim`, with one
configuration (`train/config.py` checks it and has the table of keys).

>>> import tessera as ts
>>> config = {"vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2,
...           "sequence_length": 8, "batch_size": 2, "learning_rate": 1e-2}
>>> weights = initialize_model_weights(config)
>>> state = initialize_optimizer_state(weights, config)
>>> step = make_step(config)
>>> ids = ts.tensor([[i % 32 for i in range(8)]] * 2)
>>> losses = []
>>> for _ in range(20):
...     loss, weights, state = step({"input_ids": ids, "labels": ids}, weights, state)
...     losses.append(loss.item())
>>> losses[-1] < 0.5 * losses[0], state["step"].item()
(True, 20)

An optimizer state holds `step`, a dict by weight for each kind of state, `loss_scale` and
`good_steps`, and `config`: the checked configuration, so that `apply_optimizer_update` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.checks import unfit
from ..core.dtypes import dtype_of
from ..core.errors import UsageError
from ..core.interrupts import whole
from ..core.public import asking
from ..lang.autodiff.grad import separate
from ..lang.jit.jit import Jit, jit
from ..lang.math import random
from ..lang.parallel.strategy import Strategy
from ..lang.record.operands import as_tensor
from ..lang.record.recorder import current
from ..lang.value.tensor import Like, Tensor
from ..nn.gpt_config import GPTConfig
from ..nn.losses import cross_entropy
from ..nn.module import Module, load_with_dtypes
from ..nn.transformer import GPT
from ..optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Lion,
    Momentum,
    Optimizer,
    Schedule,
    clip_by_global_norm,
    constant,
    global_norm,
    inverse_sqrt,
    warmup_cosine,
    warmup_linear,
)
from .accumulate import accumulated
from .batches import checked_batch, told
from .config import TrainingConfig, checked
from .memory import StreamedUpdate, fetched, initial_state
from .precision import autocast_of, initial_scale, moved_scale, new_if_finite, scaled, unscaled
from .unused import warn_of_needs, warn_of_unused

Config = TrainingConfig | Mapping[str, Any]
Weights = dict[str, Tensor]
State = dict[str, Any]
# Called with (ids, weights), and by name with the batch's other entries that it takes.
Model = Callable[..., Tensor]
# The entries of an optimizer state besides those of the optimizer.
EXTRA = ("loss_scale", "good_steps", "config")


# -- the model ------------------------------------------------------------------------------------
def initialize_model_weights(config: Config) -> Weights:
    """The weights of a GPT of the configured sizes by name, created at their first use.

    It calls `ts.seed` with the key `seed`, so equal configurations give equal weights.
    """
    c = checked(config)
    random.seed(c.seed)
    weights: Weights = {**GPT(c.model()).parameters()}
    if dtype_of(c.weight_dtype) is not next(iter(weights.values())).dtype:
        weights = {name: _named(t.to(c.weight_dtype), name) for name, t in weights.items()}
    return weights


def _named(t: Tensor, name: str) -> Tensor:
    t.name = name
    return t


def transformer_model(
    inputs: Tensor,
    weights: Weights,
    attention_mask: Like | None = None,
    position_ids: Like | None = None,
    **choices: Any,
) -> Tensor:
    """Logits [B, S, vocab] of token ids [B, S]; all sizes come from the weights.

    Mask and positions are those of `nn.GPT`. `choices` are `dropout` and `remat` of `nn.GPTConfig`;
    `make_model` takes them from a configuration. Raises UsageError if the weights are not those of
    a GPT.
    """
    before = random.state()
    model = GPT(_sizes(weights, **choices))
    random.set_state(before)  # its own weights are never made
    recorder = current()
    if recorder is None:  # as tensors: of another module's parameters, values would be constants
        weights = {name: separate(w) for name, w in weights.items()}
    load_with_dtypes(model, weights)
    if recorder is not None:
        recorder.root.builder.reports.append(model.config)
    logits: Tensor = model(inputs, attention_mask, position_ids)
    return logits


def _sizes(weights: Weights, **choices: Any) -> GPTConfig:
    """The configuration of a transformer, from the names and shapes of its weights. Raises
    UsageError if a weight that gives a size is missing."""
    block = "blocks.block."
    need = ("embed.weight", f"{block}attention.out", f"{block}mlp.up")
    missing = [n for n in need if n not in weights] if isinstance(weights, Mapping) else list(need)
    if missing:
        raise UsageError(
            f"transformer_model: {len(missing)} weights are missing",
            missing=", ".join(missing),
            fix="give what initialize_model_weights(config) made, or a model of your own",
        )
    vocab, d = weights["embed.weight"].shape
    layers, heads = weights[f"{block}attention.out"].shape[:2]
    kv = weights.get(f"{block}attention.kv")
    learned = "position" in weights
    return GPTConfig(
        vocab, weights["position"].shape[0] if learned else 2**30, d, layers, heads,
        None if kv is None else kv.shape[3], weights[f"{block}mlp.up"].shape[-1],
        norm="layer" if "norm.bias" in weights else "rms",
        activation="swiglu" if f"{block}mlp.gate" in weights else "gelu",
        positions="learned" if learned else "rotary", tied="head" not in weights, **choices,
    )  # fmt: skip


@dataclass(frozen=True)
class _ConfiguredModel:
    config: TrainingConfig

    def __call__(
        self,
        inputs: Tensor,
        weights: Weights,
        attention_mask: Like | None = None,
        position_ids: Like | None = None,
    ) -> Tensor:
        c = self.config
        told = {"attention_mask": attention_mask, "position_ids": position_ids}
        with autocast_of(c):
            return transformer_model(inputs, weights, **told, dropout=c.dropout, remat=c.remat)


def make_model(config: Config) -> Model:
    """`transformer_model` with the precision, dropout and recomputation of `config`.

    Equal configurations give equal models, so a compiled step is reused.
    """
    return _ConfiguredModel(checked(config))


def _need_function(caller: str, model_fn: object) -> None:
    """Raises UsageError if the model is a class or a module, which has weights of its own."""
    if isinstance(model_fn, (type, Module)) or not callable(model_fn):
        raise unfit(
            caller,
            "the model",
            model_fn,
            "give a function of (inputs, weights), as make_model(config) gives; a module trains by"
            " graph.training_step",
        )


def compute_loss(model_fn: Model, batch: Mapping[str, Tensor], weights: Weights) -> Tensor:
    """Mean cross-entropy f32[] of `model_fn` on a batch of `input_ids` and `labels`; labels of -100
    do not count.

    Other entries of the batch are passed to the arguments of `model_fn` with their names:
    `positions` as `position_ids`, which keep packed documents apart, and `attention_mask`. Warns of
    a key that the model does not take. Raises UsageError if ids or labels are missing.
    """
    _need_function("compute_loss", model_fn)
    batch = checked_batch("compute_loss", batch)
    more = told("compute_loss", model_fn, batch)
    logits = model_fn(as_tensor(batch["input_ids"]), weights, **more)
    labels = as_tensor(batch["labels"]).reshape(-1)
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels)


# -- the optimizer --------------------------------------------------------------------------------
def schedule_of(config: Config) -> Schedule:
    """The learning rate by step: linear warmup, then the decay of the key `schedule`.

    The first of `warmup_steps` steps has the rate `learning_rate / (warmup_steps + 1)`.
    """
    c = checked(config)
    peak, end, warmup = float(c.learning_rate), float(c.min_learning_rate), c.warmup_steps
    start = peak / (warmup + 1)
    match c.schedule:
        case "cosine":
            return warmup_cosine(peak, warmup, c.total_steps, end, start)
        case "linear":
            return warmup_linear(peak, warmup, c.total_steps, end, start)
        case "inverse_sqrt":
            return inverse_sqrt(peak, max(warmup, 1))
        case _:
            return (
                warmup_linear(peak, warmup, warmup + 1, peak, start) if warmup else constant(peak)
            )


def optimizer_of(config: Config) -> Optimizer:
    """The optimizer of the configuration."""
    c = checked(config)
    lr, decay, betas = schedule_of(c), float(c.weight_decay), c.betas
    match c.optimizer:
        case "adamw":
            return AdamW(lr, betas=betas, eps=c.eps, weight_decay=decay)
        case "adam":
            return Adam(lr, betas=betas, eps=c.eps, weight_decay=decay)
        case "sgd":
            return SGD(lr, weight_decay=decay)
        case "momentum":
            return Momentum(lr, momentum=c.momentum, weight_decay=decay)
        case "lion":
            return Lion(lr, betas=betas, weight_decay=decay)
        case _:
            return Adafactor(lr, weight_decay=decay)


def initialize_optimizer_state(
    weights: Weights, config: Config, strategy: Strategy | str | None = None
) -> State:
    """The optimizer state before the first step, laid out by `strategy` (see `Optimizer.init`).

    Warns of keys that have no effect, such as `momentum` with AdamW.
    """
    c = checked(config)
    warn_of_needs("initialize_optimizer_state", c)
    first = initial_state if c.offload_optimizer_state else Optimizer.init
    made = first(optimizer_of(c), weights, strategy)
    mesh = next((w.mesh for w in weights.values() if w.mesh is not None), None)
    return {**made, **initial_scale(c, mesh), "config": c}


def optimizer_step(
    weights: Weights, grads: Weights, state: State, config: Config
) -> tuple[Weights, State]:
    """(new weights, new state) after one step of the configured optimizer."""
    c = _on_device("optimizer_step", checked(config))
    warn_of_unused("optimizer_step", c)
    weights, made = optimizer_of(c).update(weights, grads, _user_state(state))
    return weights, {**state, **made}


def apply_optimizer_update(weights: Weights, grads: Weights, state: State) -> Weights:
    """The new weights; `state`, which contains the configuration, is changed in place."""
    new, made = optimizer_step(weights, grads, state, _config_in(state, "apply_optimizer_update"))
    state.update(made)
    return new


def adam_optimizer(weights: Weights, grads: Weights, config: dict[str, Any]) -> Weights:
    """The new weights; the state at `config["optimizer_state"]` is changed in place."""
    state = config.get("optimizer_state") if isinstance(config, dict) else None
    if state is None:
        raise UsageError(
            "adam_optimizer: the config holds no optimizer state",
            fix='config["optimizer_state"] = initialize_optimizer_state(weights, config)',
        )
    return apply_optimizer_update(weights, grads, state)


def initialize_parameter_states(weights: Weights, config: Config) -> dict[str, State]:
    """A separate state for each weight, so that each may have another owner (guide 4, ZeRO)."""
    c = checked(config)
    out = {}
    for name, w in weights.items():
        made = optimizer_of(c).init({name: w})
        slots = {kind: d[name] for kind, d in made.items() if kind != "step"}
        out[name] = {"step": made["step"], **slots, "name": name, "config": c}
    return out


def adam_update_single_param(weight: Tensor, grad: Tensor, state: State) -> Tensor:
    """The new weight; `state`, from `initialize_parameter_states`, is changed in place."""
    c = _config_in(state, "adam_update_single_param")
    name = state["name"]
    slots = {k: v for k, v in state.items() if k not in ("step", "name", "config")}
    old = {"step": state["step"], **{kind: {name: t} for kind, t in slots.items()}}
    new, made = optimizer_of(c).update({name: weight}, {name: grad}, old)
    state.update(step=made["step"], **{kind: made[kind][name] for kind in slots})
    out: Tensor = new[name]
    return out


def _user_state(state: State) -> State:
    return {k: v for k, v in state.items() if k not in EXTRA}


def _config_in(state: object, call: str) -> TrainingConfig:
    found = state.get("config") if isinstance(state, Mapping) else None
    if isinstance(found, TrainingConfig):
        return found
    raise unfit(
        call, "optimizer_state", state, "start from initialize_optimizer_state(weights, config)"
    )


def _on_device(call: str, c: TrainingConfig) -> TrainingConfig:
    if c.offload_optimizer_state and current() is not None:
        raise UsageError(
            f"{call}: an optimizer state in host memory cannot be updated inside one program",
            fix="use make_step(config), which updates weight by weight",
        )
    return c


# -- gradients ------------------------------------------------------------------------------------
def clip_gradients(grads: Weights, max_norm: float) -> Weights:
    """The gradients, scaled down to a global norm of at most `max_norm`."""
    clipped: Weights = clip_by_global_norm(grads, max_norm)[0]
    return clipped


compute_gradient_norm = global_norm


def gradients_of(
    model_fn: Model,
    batch: Mapping[str, Tensor],
    weights: Weights,
    optimizer_state: State,
    config: Config,
) -> tuple[Tensor, Weights, Tensor | None]:
    """(loss, gradients, bool[] that is true if all are finite) of a batch: scaled for the backward
    pass, unscaled and clipped by `config`. The last is None without a loss scale."""
    c, batch = checked(config), checked_batch("gradients_of", batch)

    def loss_of(part: Mapping[str, Tensor], weights: Weights) -> Tensor:
        with autocast_of(c):
            return compute_loss(model_fn, part, weights)

    def goal(loss: Tensor) -> Tensor:
        return scaled(c, loss, optimizer_state)

    loss, grads = accumulated(loss_of, batch, weights, c.accumulation_steps, goal, c.reduce_dtype)
    grads, finite = unscaled(c, grads, optimizer_state)
    if c.gradient_clip_norm > 0:
        grads = clip_gradients(grads, c.gradient_clip_norm)
    return loss, grads, finite


# -- the step -------------------------------------------------------------------------------------
def training_step(
    model_fn: Model,
    batch: Mapping[str, Tensor],
    weights: Weights,
    optimizer_state: State,
    config: Config,
) -> tuple[Tensor, Weights, State]:
    """(loss, new weights, new state) after one step with all settings of `config`.

    A step whose scaled gradients overflow changes only the loss scale.
    """
    c = _on_device("training_step", checked(config))
    loss, grads, finite = gradients_of(model_fn, batch, weights, optimizer_state, c)
    warn_of_unused("training_step", c)
    new, made = optimizer_of(c).update(weights, grads, _user_state(optimizer_state))
    new, made = new_if_finite(finite, (new, made), (weights, _user_state(optimizer_state)))
    scale = moved_scale(c, finite, optimizer_state)
    return loss, new, {**optimizer_state, **made, **scale}


Step = Callable[[Mapping[str, Tensor], Weights, State], tuple[Tensor, Weights, State]]


def make_step(config: Config, model_fn: Model | None = None) -> Step:
    """A compiled `step(batch, weights, state)` -> (loss, weights, state) that donates weights and
    state, so the old ones cannot be used after it.

    With `offload_optimizer_state` the state stays in host memory: one program computes the
    gradients, then each weight is updated by its own program. The step has `.programs`, the
    compiled functions that it runs.
    """
    c = checked(config)
    if model_fn is not None:
        _need_function("make_step", model_fn)
    model = make_model(c) if model_fn is None else model_fn
    return _Streamed(c, model) if c.offload_optimizer_state else _Whole(c, model)


class _Whole:
    def __init__(self, c: TrainingConfig, model: Model) -> None:
        @jit(donate=("weights", "state"))
        def train_step(batch: Any, weights: Any, state: Any) -> Any:
            return training_step(model, batch, weights, state, c)

        self._step: Jit[..., Any] = train_step
        self.programs = [train_step]

    def __call__(self, batch: Any, weights: Weights, state: State) -> Any:
        return self._step(batch, weights, state)


class _Streamed:
    def __init__(self, c: TrainingConfig, model: Model) -> None:
        self._config = c

        @jit
        def gradients(batch: Any, weights: Any, scale: Any) -> Any:
            loss, grads, finite = gradients_of(model, batch, weights, scale, c)
            return loss, grads, finite, moved_scale(c, finite, scale)

        self._gradients: Jit[..., Any] = gradients
        self._update = StreamedUpdate(optimizer_of(c), new_if_finite)

    @property
    def programs(self) -> list[Jit[..., Any]]:
        return [self._gradients, *self._update.programs.values()]

    @whole
    def __call__(self, batch: Any, weights: Weights, state: State) -> Any:
        scale = fetched({name: state[name] for name in ("loss_scale", "good_steps")})
        loss, grads, finite, scale = self._gradients(batch, weights, scale)
        weights, made = self._update(weights, grads, _user_state(state), finite)
        return loss, weights, {**state, **made, **scale}


for _kind in (_Whole, _Streamed):  # with errors of ours for arguments that they lack
    _kind.__call__ = asking(_kind.__call__, "step", of_object=True)  # type: ignore[method-assign]


__all__ = [
    "adam_optimizer", "adam_update_single_param", "apply_optimizer_update", "clip_gradients",
    "compute_gradient_norm", "compute_loss", "gradients_of", "initialize_model_weights",
    "initialize_optimizer_state", "initialize_parameter_states", "make_model", "make_step",
    "optimizer_of", "optimizer_step", "schedule_of", "training_step", "transformer_model",
]  # fmt: skip
