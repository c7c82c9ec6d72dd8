"""Losses in f32; cross-entropy also in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from ..core.declared import Count, Flag, Integer, OneOf, Positive, Share
from ..core.dtypes import adds_up_in, f32, int32
from ..core.errors import ShapeError
from ..core.tensor_checks import floats, integers, shaped
from ..lang.autodiff.custom import custom_gradient
from ..lang.autodiff.map_chunks import to_blocks
from ..lang.autodiff.scan import scan
from ..lang.math import functions as F
from ..lang.record.index_bounds import check_ids
from ..lang.record.operands import as_tensor, emit, scalar
from ..lang.record.recorder import choose
from ..lang.value.checks import fitting
from ..lang.value.tensor import Like, Tensor
from .activations import softplus
from .block_size import rows_at_once
from .functional import logits, row_order, rows_of, soft_cap, wide

Reduction = Annotated[str, OneOf("mean", "sum", "none")]
BatchReduction = Annotated[str, OneOf("mean", "sum", "none", "batchmean")]


def _check_labels(
    name: str, caller_text: str, x: Tensor, labels: Tensor, classes: int, ignore: int
) -> None:
    """Raises DTypeError or ShapeError unless `labels` are integers, one for each row of `x`, and
    within range as far as the host knows them."""
    if labels.dtype.is_float and labels.shape == x.shape:  # as PyTorch takes them too
        fix = "give ids of classes; for probabilities write -(p * nn.log_softmax(x)).sum(-1).mean()"
        integers(name, "labels", labels.type, fix)
    integers(name, "labels", labels.type)
    if not x.ndim or labels.shape != x.shape[:-1]:
        raise ShapeError(
            f"{name}: one label per row of {caller_text} is needed",
            rows=[(caller_text, x.type), ("labels", labels.type)],
            fix=_classes_last(x, labels)
            or f"reshape labels to the shape of {caller_text} without its last dim",
        )
    check_ids(name, "label", labels, classes, ignore=ignore)


def _classes_last(x: Tensor, labels: Tensor) -> str:
    """A fix for errors, if the classes are in dim 1, as in PyTorch, or the labels are one-hot."""
    if x.ndim > 2 and labels.shape == (x.shape[0], *x.shape[2:]):
        back = ", ".join(map(str, (0, *range(2, x.ndim), 1)))
        return f"classes come last: x.permute({back})"
    return "give ids of classes: ts.argmax(labels, -1)" if labels.shape == x.shape else ""


def _ignored(name: str, value: object) -> int:
    return int(fitting(name, value, int32))


@dataclass(frozen=True)
class _Classes:
    """The settings of a loss over classes: `weight` [V] per class, and `smoothing`, the part of
    each label that is spread over all classes."""

    weight: Tensor | None
    smoothing: float

    def counted(self, labels: Tensor, keep: Tensor) -> Tensor:
        """The weight of each row."""
        if self.weight is None:
            return keep
        return keep * wide(F.take_or_zero(self.weight, labels))  # an ignored label may be outside


def _classes(name: str, count: int, weight: Like | None, smoothing: float) -> _Classes:
    w = None if weight is None else as_tensor(weight)
    if w is not None:
        shaped(name, "weight", w.type, (count,))
        floats(name, "weight", w.type)
    return _Classes(w, smoothing)


def _of_label(x: Tensor, labels: Tensor) -> Tensor:
    """The element of each row of `x` [..., V] at its label [...]; 0 for a label out of range."""
    return F.gather_or_zero(x, labels.reshape(*labels.shape, 1)).reshape(labels.shape)


def _nll(logits: Tensor, labels: Tensor, keep: Tensor, classes: _Classes) -> Tensor:
    """The summed negative log-likelihood of the labels where `keep` is 1."""
    w = wide(logits)
    z = w - F.stop_gradient(F.max(w, -1, True))
    picked = _of_label(z, labels)
    total = F.log(F.sum(F.exp(z), -1))
    loss = F.sum((total - picked) * classes.counted(labels, keep))
    if not classes.smoothing:
        return loss
    rows = total.reshape(*total.shape, 1) - z
    rows = rows if classes.weight is None else rows * wide(classes.weight)
    spread = F.sum(F.sum(rows, -1) * keep) * (classes.smoothing / z.shape[-1])
    return loss * (1.0 - classes.smoothing) + spread


def cross_entropy(
    logits: Like,
    labels: Like,
    ignore_index: Integer = -100,
    *,
    weight: Like | None = None,
    label_smoothing: Share = 0.0,
) -> Tensor:
    """The mean negative log-likelihood of integer `labels` [...] under `logits` [..., V]: f32[].

    It is in nats. Rows with the label `ignore_index` count neither in the sum nor in the mean. Any
    other label outside of 0 to V - 1 raises ShapeError if the host knows the labels; on the device
    it makes the loss NaN. `weight` [V] weights each row by its label, in the sum and in the mean.
    `label_smoothing` spreads this part of each label over all classes. Both are as in PyTorch.
    Raises ShapeError if the shapes do not fit, DTypeError if `labels` are not integers, UsageError
    if `label_smoothing` is out of range.
    """
    x, y = as_tensor(logits), as_tensor(labels)
    classes = x.shape[-1] if x.ndim else 0
    ignore_index = _ignored("cross_entropy", ignore_index)
    _check_labels("cross_entropy", "logits", x, y, classes, ignore_index)
    keep = emit("inside", y, size=classes, ignore=ignore_index)
    how = _classes("cross_entropy", classes, weight, label_smoothing)
    return _mean(_nll(x, y, keep, how), y, keep, how)


def _count(keep: Tensor) -> Tensor:
    """The divisor of the mean loss: the number of rows that count, at least 1."""
    return F.maximum(F.sum(keep), 1.0)


def _mean(total: Tensor, labels: Tensor, keep: Tensor, classes: _Classes) -> Tensor:
    if classes.weight is None:
        return total / _count(keep)
    weight = F.sum(classes.counted(labels, keep))
    return total / F.where(weight == 0.0, 1.0, weight)


def linear_cross_entropy(
    x: Like,
    weight: Like,
    labels: Like,
    ignore_index: Integer = -100,
    rows: Count | None = None,
    *,
    class_weight: Like | None = None,
    label_smoothing: Share = 0.0,
    bias: Like | None = None,
    cap: Positive | None = None,
) -> Tensor:
    """`cross_entropy(x @ weight, labels)` in blocks of rows, so the logits never exist whole.

    x is [..., d], weight [d, V], labels [...]. `bias` [V] is added to the logits, which `cap` then
    bounds, as `cap * tanh(logits / cap)`. Loss and gradient are computed in one loop, so each
    block's logits are computed once. `rows` is the number of rows of a block on one device; None:
    512 on a CPU, and elsewhere as many as have 1 GiB of logits. Raises the errors of
    `cross_entropy`, and UsageError unless `rows` is a whole number from 1 on.
    """
    t, y = as_tensor(x), as_tensor(labels)
    ignore_index = _ignored("linear_cross_entropy", ignore_index)
    weight, bias = as_tensor(weight), None if bias is None else as_tensor(bias)
    classes = weight.shape[-1] if weight.ndim else 0
    most = rows_at_once(rows, t, classes)
    _check_labels("linear_cross_entropy", "x", t, y, classes, ignore_index)
    if t.mesh is not None:  # a label is on the device of its row
        y = F.relayout(y, y.type.on(t.mesh).with_dims(t.type.dims[:-1]))
    sizes, order = row_order(t)
    flat, y = rows_of(t, sizes, order), rows_of(y, sizes, order, 0)
    keep = emit("inside", y, size=classes, ignore=ignore_index)

    how = _classes("linear_cross_entropy", classes, class_weight, label_smoothing)

    simple = class_weight is None and not label_smoothing and bias is None and cap is None
    simple = simple and flat.size > 0 and weight.size > 0  # of no elements there are no tiles
    if simple and choose("head_loss", "blocks", ("kernel",)) == "kernel":
        from .kernels import losses_by_kernel  # imports the texts of kernels

        x, w = F.narrowed(flat, weight)
        losses = losses_by_kernel(x, w, y.to(int32), ignore_index)
        return _mean(F.sum(losses * keep), y, keep, how)

    def body(total: Tensor, block: Any) -> tuple[Tensor, tuple[()]]:
        h, labels, keep = block
        term = _nll(soft_cap(logits(h, weight, bias), cap), labels, keep, how)
        return total + term.to(total.dtype), ()

    blocks = tuple(to_blocks(v, most) for v in (flat, y, keep))
    start = scalar(0.0, adds_up_in(flat.dtype, weight.dtype))
    total, _ = scan(body, start, blocks, policy="together", name="head_loss")
    return _mean(total, y, keep, how)


# -- of numbers -----------------------------------------------------------------------------------


def reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else F.mean(loss) if reduction == "mean" else F.sum(loss)


def pair(name: str, x: Like, target: Like) -> tuple[Tensor, Tensor]:
    """`x` and `target` in f32. Raises ShapeError unless they have the same shape."""
    a, b = as_tensor(x), as_tensor(target)
    if a.shape != b.shape:
        raise ShapeError(
            f"{name}: the target has shape {b.shape}, not {a.shape}",
            x=a.type,
            target=b.type,
            fix="give both one shape, e.g. by ts.squeeze, ts.unsqueeze or ts.broadcast_to",
        )
    return wide(a), wide(b)


def mse_loss(x: Like, target: Like, reduction: Reduction = "mean") -> Tensor:
    """The squared difference of `x` and `target`, in f32: by default its mean over all elements.

    `reduction` is "mean", "sum" or "none". Raises ShapeError if the shapes differ (PyTorch
    broadcasts them), UsageError for another reduction.
    """
    a, b = pair("mse_loss", x, target)
    d = a - b
    return reduced(d * d, reduction)


def binary_cross_entropy_with_logits(
    logits: Like,
    target: Like,
    weight: Like | None = None,
    reduction: Reduction = "mean",
    pos_weight: Like | None = None,
) -> Tensor:
    """The cross-entropy in nats of `sigmoid(logits)` and `target` from 0 to 1, in f32.

    `weight` multiplies each element's loss, `pos_weight` its part for the target 1; both broadcast
    to the shape of `logits`. `reduction` is "mean" (over all elements), "sum" or "none". Raises
    ShapeError if the shapes do not fit, UsageError for another reduction.
    """
    name = "binary_cross_entropy_with_logits"
    z, y = pair(name, logits, target)
    # -log sigmoid(z) = softplus(-z), and -log(1 - sigmoid(z)) = z + softplus(-z)
    late = softplus(-z)
    if pos_weight is not None:
        late = late * (y * (_spread(name, "pos_weight", pos_weight, z) - 1.0) + 1.0)
    loss = z * (1.0 - y) + late
    if weight is not None:
        loss = loss * _spread(name, "weight", weight, z)
    return reduced(loss, reduction)


def _spread(name: str, argument: str, value: Like, like: Tensor) -> Tensor:
    """`value` in f32, broadcast to the shape of `like`. Raises ShapeError if it does not
    broadcast."""
    t = wide(value)
    if t.ndim > like.ndim or any(n not in (1, s) for n, s in zip(t.shape[::-1], like.shape[::-1])):
        raise ShapeError(
            f"{name}: {argument} does not broadcast to {like.shape}",
            rows=[(argument, t.type), ("logits", like.type)],
            fix=f"give it the shape {like.shape}, or 1 in some dims",
        )
    return F.broadcast_to(t, like.shape)


def nll_loss(
    log_probs: Like,
    labels: Like,
    weight: Like | None = None,
    ignore_index: Integer = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Minus the log-probability of each label, in f32: by default the mean over labels that count.

    `log_probs` are [..., V], `labels` integers [...] (PyTorch has the classes in dim 1). Labels of
    `ignore_index` do not count; others have the weight of their class in `weight` [V]. `reduction`
    is "mean", "sum" or "none". Raises DTypeError or ShapeError if labels or weights do not fit,
    UsageError for another reduction.
    """
    t, at = wide(log_probs), as_tensor(labels)
    ignore, size = _ignored("nll_loss", ignore_index), t.shape[-1] if t.ndim else 0
    classes = _classes("nll_loss", size, weight, 0.0)
    _check_labels("nll_loss", "log_probs", t, at, size, ignore)
    counted = classes.counted(at, (at != ignore).to(f32))
    each = -_of_label(t, at) * counted
    if reduction == "mean":
        return F.sum(each) / F.sum(counted)
    return reduced(each, reduction)


def binary_cross_entropy(
    probs: Like, target: Like, weight: Like | None = None, reduction: Reduction = "mean"
) -> Tensor:
    """The cross-entropy in nats of the probabilities `probs` and `target` from 0 to 1, in f32.

    Logarithms are at least -100, and gradients by `probs` at most 1e12, as in PyTorch. For logits,
    `binary_cross_entropy_with_logits` is more accurate. `weight` multiplies each element's loss.
    Raises ShapeError if the shapes do not fit, UsageError for another reduction.
    """
    name = "binary_cross_entropy"
    p, y = pair(name, probs, target)
    loss = _binary(p, y)
    if weight is not None:
        loss = loss * _spread(name, "weight", weight, p)
    return reduced(loss, reduction)


@custom_gradient
def _binary(p: Tensor, y: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    # PyTorch's bounds, here and below: results stay finite for probabilities 0 and 1.
    yes, no = F.maximum(F.log(p), -100.0), F.maximum(F.log1p(-p), -100.0)

    def backward(g: Tensor) -> tuple[Tensor, Tensor]:
        return g * (p - y) / F.maximum(p * (1.0 - p), 1e-12), g * (no - yes)

    return -(y * yes + (1.0 - y) * no), backward


def kl_div(
    x: Like, target: Like, reduction: BatchReduction = "mean", log_target: Flag = False
) -> Tensor:
    """`target * (log(target) - x)`, with `x` the logarithms of probabilities, in f32.

    This is the Kullback-Leibler divergence of the distribution `target` from `exp(x)`. With
    `log_target` the target is given as logarithms too. A target of 0 gives 0. `reduction` is "mean"
    (over all elements, as in PyTorch), "batchmean" (the sum divided by the size of dim 0, as in the
    mathematical definition), "sum" or "none". Raises ShapeError if the shapes differ, UsageError
    for another reduction.
    """
    p, q = pair("kl_div", x, target)
    if log_target:
        each = F.exp(q) * (q - p)
    else:
        none = q == 0.0
        safe = F.where(none, 1.0, q)
        each = F.where(none, 0.0, q * (F.log(safe) - p))
    if reduction == "batchmean":
        return F.sum(each) * (1.0 / max(1, each.shape[0] if each.ndim else 1))
    return reduced(each, reduction)
