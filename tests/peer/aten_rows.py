"""Calls of ATen's ops that PyTorch's own samples do not make, and what is not compared.

A row is the name of an op and its calls. A call is a function of a generator, which returns the
positional arguments, and by name those after a dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Draw:
    """Tensors of drawn values."""

    def __init__(self) -> None:
        self.g = torch.Generator().manual_seed(7)

    def f(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.g).to(dtype)

    def i(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.g)

    def b(self, *shape: int) -> torch.Tensor:
        return self.i(2, *shape) > 0

    def h(self, *shape: int) -> torch.Tensor:
        return self.f(*shape, dtype=torch.bfloat16)


Call = Callable[[Draw], tuple[Any, ...]]
ROWS: dict[str, list[Call]] = {}


def row(names: str, *calls: Call) -> None:
    for name in names.split():
        full = name if name.startswith("transformers") else f"aten.{name}"
        ROWS[full if "." in name else f"{full}.default"] = list(calls)


# -- elementwise ----------------------------------------------------------------------------------
row("isfinite positive square relu6 selu log_sigmoid", lambda d: (d.f(3, 4),), lambda d: (d.f(),))
row(
    "binary_cross_entropy",
    lambda d: (torch.tensor([0.0, 1.0, 1.0, 0.5]), torch.tensor([0.0, 1.0, 0.0, 1.0])),
)
row("sinc", lambda d: (torch.tensor([0.0, 0.5]),))
row("std_mean.correction", lambda d: (torch.ones(2, 3), [1]))
row("xlogy.Tensor", lambda d: (torch.tensor([0.0, 0.0, 2.0]), torch.tensor([3.0, 0.5, 2.0])))
NAN = [2.0, float("nan"), 1.0, 2.0]
row("median", lambda d: (torch.tensor(NAN),), lambda d: (d.f(3, 4),))
row("median.dim", lambda d: (torch.tensor(NAN), 0), lambda d: (d.f(3, 4), 1, True))
row("max_pool2d_with_indices", lambda d: (d.f(1, 2, 5, 6), [3, 3], [2, 2], [1, 1]))
row("pow.Tensor_Scalar", lambda d: (torch.tensor([0.5, 1.0, 2.0]), float("inf")))
row("fmax fmin", lambda d: (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0])))
# where pieces meet, and at -0
row("relu hardtanh elu celu hardsigmoid hardswish signbit",
    lambda d: (torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5]),))  # fmt: skip
for _op in ("and", "or", "xor"):
    row(f"__{_op}__.Tensor", lambda d: (d.i(9, 3), d.i(9, 3)), lambda d: (d.b(3), d.b(3)))
    row(
        f"__{_op}__.Scalar bitwise_{_op}.Scalar", lambda d: (d.i(9, 3), 5), lambda d: (d.b(3), True)
    )
row("__lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor_Scalar "
    "bitwise_right_shift.Tensor_Scalar", lambda d: (d.i(99, 4), 2))  # fmt: skip
row("gt.Scalar fmod.Scalar copysign.Scalar true_divide.Tensor", lambda d: (d.f(3, 4), 1.5))
ROWS["aten.fmod.Scalar"].append(lambda d: (torch.tensor([0.0, 2.5, -2.5]), 2.0))
ROWS["aten.true_divide.Tensor"] = [lambda d: (d.f(3), d.f(3)), lambda d: (d.i(5, 3), d.i(5, 3) + 1)]
row("floor_divide.Scalar", lambda d: (d.i(20, 5) - 10, 3), lambda d: (d.f(5), 0.5))
row("div.Scalar_mode", lambda d: (d.i(20, 5) - 10, 3, {"rounding_mode": "trunc"}),
    lambda d: (d.f(5), 0.3, {"rounding_mode": "floor"}))  # fmt: skip
row("remainder.Scalar_Tensor", lambda d: (5, d.i(4, 3) + 1), lambda d: (2.5, d.f(3)))
row("pow.Scalar", lambda d: (2.0, d.f(3)), lambda d: (3, d.i(4, 5)))
row("isclose", lambda d: ((x := d.f(5)), x * (1 + 1e-6 * torch.arange(5)), 1e-6, 0.0))
row("masked_fill.Tensor", lambda d: (d.f(2, 3), d.b(2, 3), torch.tensor(2.0)))
row("where.Scalar", lambda d: (d.b(3), 1.0, 2.0), lambda d: (d.b(3), 1, 2))
row("where.ScalarSelf", lambda d: (d.b(3), 1.0, d.f(3)))
row("where.ScalarOther", lambda d: (d.b(3), d.f(3), 1.0))
row("xlogy.Scalar_Other", lambda d: (d.f(3), 2.0))
row("xlogy.Scalar_Self", lambda d: (2.0, d.f(3).abs()))
row("clamp_max", lambda d: (d.f(4), 0.3), lambda d: (d.i(9, 4), 3))
row("to.dtype", lambda d: (d.f(4) * 3, torch.int64), lambda d: (d.f(4), torch.bfloat16))
row("view.dtype", lambda d: (d.f(4), torch.int32))
row("one_hot", lambda d: (d.i(4, 5), 4))

# -- shapes ---------------------------------------------------------------------------------------
row("contiguous lift lift_fresh_copy detach_copy", lambda d: (d.f(2, 3),))
row(
    "concat concatenate",
    lambda d: ([d.f(2, 3), d.f(1, 3)],),
    lambda d: ([d.f(2, 3), d.i(3, 2, 1)], 1),
)
row("reshape _reshape_copy", lambda d: (d.f(2, 6), [3, -1]))
row("flatten.using_ints", lambda d: (d.f(2, 3, 4), 1, 2))
row("unflatten.int", lambda d: (d.f(2, 6), 1, [3, 2]))
row("narrow", lambda d: (d.f(5, 2), 0, 1, 3))
row("chunk", lambda d: (d.f(7, 2), 3))
row("split.sizes", lambda d: (d.f(6, 2), [1, 5]))
row("split_copy.Tensor", lambda d: (d.f(7, 2), 3))
row("select_copy.int", lambda d: (d.f(3, 4), 1, -1))
row("slice_copy.Tensor", lambda d: (d.f(6, 4), 0, 1, 2**63 - 1, 2))
row("squeeze_copy.dims", lambda d: (d.f(1, 3, 1), [0, 2]))
row("tile", lambda d: (d.f(2, 3), [2, 1, 2]))
row("repeat_interleave.self_int", lambda d: (d.f(2, 3), 2, 1), lambda d: (d.f(2, 3), 2))
row("pad", lambda d: (d.f(1, 2, 5), [1, 2]), lambda d: (d.f(1, 2, 5), [1, 2], "reflect"))
row("reflection_pad2d", lambda d: (d.f(1, 2, 4, 5), [1, 2, 3, 1]))
row("reflection_pad3d replication_pad3d", lambda d: (d.f(1, 2, 4, 5, 3), [1, 2, 3, 1, 0, 1]))
row("copy", lambda d: (d.f(2, 3), d.i(5, 3)), lambda d: (d.i(5, 2), d.f(2) * 4))
row("fill.Tensor", lambda d: (d.f(2, 3), torch.tensor(2.5)))
row("arange.start", lambda d: (2, 7), lambda d: (0.5, 3.0))
row("sym_size.int sym_stride.int", lambda d: (d.f(2, 3, 4), 1))
row("sym_numel sym_storage_offset", lambda d: (d.f(2, 3),))

# -- reads and writes -----------------------------------------------------------------------------
row("argsort", lambda d: (d.f(3, 7),), lambda d: (d.f(3, 7), 0, True))
row("argsort.stable", lambda d: (d.i(3, 3, 7), {"stable": True, "dim": 0, "descending": True}))
row("bucketize.Scalar", lambda d: (0.3, d.f(6).sort()[0]))
row("searchsorted.Scalar", lambda d: (d.f(6).sort()[0], 0.1))
row("_unsafe_index.Tensor", lambda d: (d.f(4, 5), [None, d.i(5, 3)]))
row("_unsafe_index_put index_put", lambda d: (d.f(4, 5), [d.i(4, 3), d.i(5, 3)], d.f(3), True),
    lambda d: (d.f(4, 5), [None, torch.tensor([1, 3])], d.f(4, 2)),
    lambda d: (d.f(4, 5), [torch.tensor([2, 2, 0])], d.f(3, 5)),
    lambda d: (d.f(4, 5), [d.b(4, 5)], torch.tensor(3.0)))  # fmt: skip
row(
    "scatter.value",
    lambda d: (d.f(4, 5), 1, d.i(5, 4, 2), 2.5),
    lambda d: (d.b(4, 3), 0, d.i(4, 2, 3), True),
)
row("masked_scatter", lambda d: (d.f(4, 5), d.b(4, 5), d.f(20)))
row("take_along_dim", lambda d: (d.f(3, 4), d.i(4, 3, 2), 1), lambda d: (d.f(3, 4), d.i(12, 5)))
row("embedding", lambda d: (d.f(6, 3), d.i(6, 2, 4)), lambda d: (d.f(6, 3), d.i(6, 2, 4), 1))

# -- reductions -----------------------------------------------------------------------------------
row("norm.Scalar", lambda d: (d.f(3, 4),), lambda d: (d.f(3, 4), 1))
row("std var", lambda d: (d.f(3, 4),), lambda d: (d.f(3, 4), False))
row("std.dim var.dim", lambda d: (d.f(3, 4), [1]), lambda d: (d.f(3, 4), [0, 1], False, True))

# -- products -------------------------------------------------------------------------------------
row("linear", lambda d: (d.f(2, 3, 4), d.f(5, 4), d.f(5)), lambda d: (d.f(4), d.f(5, 4)))
row(
    "matmul",
    lambda d: (d.f(2, 3, 4), d.f(4, 5)),
    lambda d: (d.f(4), d.f(4)),
    lambda d: (d.h(3, 4), d.h(4, 2)),
)
row("outer", lambda d: (d.f(3), d.f(4)))
row("einsum", lambda d: ("bij,bjk->bik", [d.f(2, 3, 4), d.f(2, 4, 5)]))
row("cdist", lambda d: (d.f(3, 4), d.f(5, 4), 1.0))
row(
    "_grouped_mm", lambda d: (d.h(8, 16), d.h(3, 16, 8), torch.tensor([2, 2, 8], dtype=torch.int32))
)

# -- convolutions, pooling, resizing --------------------------------------------------------------
row("conv1d", lambda d: (d.f(2, 3, 8), d.f(4, 3, 3), d.f(4), [2], [1]))
row("conv1d.padding", lambda d: (d.f(2, 3, 8), d.f(4, 3, 3), d.f(4), [1], "same"))
row("conv2d", lambda d: (d.f(2, 4, 6, 7), d.f(4, 2, 3, 3), None, [1, 2], [1, 0], [1, 1], 2))
row("conv2d.padding", lambda d: (d.f(2, 3, 6, 7), d.f(4, 3, 3, 3), None, [1, 1], "same"))
row("conv3d", lambda d: (d.f(1, 2, 4, 5, 6), d.f(3, 2, 2, 2, 2), d.f(3)))
row(
    "conv3d.padding", lambda d: (d.f(1, 2, 4, 5, 6), d.f(3, 2, 3, 3, 3), d.f(3), [1, 1, 1], "valid")
)
row(
    "_convolution",
    lambda d: (
        d.f(2, 3, 8),
        d.f(4, 3, 3),
        d.f(4),
        [1],
        [1],
        [1],
        False,
        [0],
        1,
        False,
        False,
        True,
        True,
    ),
)
row(
    "avg_pool1d",
    lambda d: (d.f(2, 3, 9), [3], [2], [1]),
    lambda d: (d.f(2, 3, 9), [3], [2], [1], True, False),
)
row("max_pool1d max_pool1d_with_indices", lambda d: (d.f(2, 3, 9), [3], [2], [1]))
row("max_pool2d", lambda d: (d.f(2, 3, 9, 8), [3, 2], [2, 2], [1, 1], [1, 2], True))
row("max_pool3d", lambda d: (d.f(1, 2, 4, 5, 6), [2, 2, 2]))
row("adaptive_avg_pool1d", lambda d: (d.f(2, 3, 9), [4]))
row("adaptive_avg_pool2d", lambda d: (d.f(2, 3, 9, 7), [4, 7]))
row("adaptive_avg_pool3d", lambda d: (d.f(1, 2, 5, 4, 6), [2, 4, 3]))
row("grid_sampler", *[
    lambda d, m=m, p=p, a=a: (d.f(2, 3, 4, 5), d.f(2, 3, 3, 2), m, p, a)
    for m in (0, 1) for p in (0, 1, 2) for a in (True, False)
])  # fmt: skip
for _dims, _mode in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d"), (2, "bicubic2d")):
    row(f"upsample_{_mode}.vec",
        lambda d, n=_dims: (d.f(1, 2, *[4, 5, 3][:n]), [6, 3, 5][:n], False, None),
        lambda d, n=_dims: (d.f(1, 2, *[4, 5, 3][:n]), None, True, [2, 1.5, 2][:n]))  # fmt: skip
for _dims in (1, 2, 3):
    row(f"upsample_nearest{_dims}d.vec",
        lambda d, n=_dims: (d.f(1, 2, *[4, 5, 3][:n]), [6, 3, 5][:n], None),
        lambda d, n=_dims: (d.f(1, 2, *[4, 5, 3][:n]), None, [2.0, 1.5, 2.0][:n]))  # fmt: skip
row("upsample_nearest3d", lambda d: (d.f(1, 2, 4, 5, 3), [6, 3, 5]))

# -- norms, attention -----------------------------------------------------------------------------
row("layer_norm", lambda d: (d.f(2, 3, 4), [4], d.f(4), d.f(4)), lambda d: (d.f(2, 3, 4), [3, 4]))
row("group_norm", lambda d: (d.f(2, 4, 3), 2, d.f(4), d.f(4)))
row(
    "rms_norm _fused_rms_norm",
    lambda d: (d.f(2, 3, 4), [4], d.f(4), 1e-5),
    lambda d: (d.f(2, 3, 4), [4], None, None),
)
_STATS: Call = lambda d: (d.f(3, 4, 5), d.f(4), d.f(4), d.f(4), d.f(4).abs())  # noqa: E731
row(
    "_native_batch_norm_legit_functional",
    lambda d: (*_STATS(d), True, 0.1, 1e-5),
    lambda d: (*_STATS(d), False, 0.1, 1e-5),
)
row("_native_batch_norm_legit_no_training", lambda d: (*_STATS(d), 0.1, 1e-5))
row("_native_batch_norm_legit.no_stats", lambda d: (d.f(3, 4, 5), d.f(4), d.f(4), True, 0.1, 1e-5))
row("_weight_norm_interface", lambda d: (d.f(3, 4), d.f(3, 1), 0))
row(
    "softmax.int log_softmax.int", lambda d: (d.f(3, 4), 0), lambda d: (d.h(3, 4), 1, torch.float32)
)
row("l1_loss", lambda d: (d.f(3), d.f(3)), lambda d: (d.f(3), d.f(3), 0))
row("scaled_dot_product_attention", lambda d: (d.f(2, 4, 5, 8), d.f(2, 4, 5, 8), d.f(2, 4, 5, 8)),
    lambda d: (d.f(2, 4, 3, 8), d.f(2, 4, 5, 8), d.f(2, 4, 5, 6), None, 0.0, True),
    lambda d: (d.f(2, 4, 5, 8), d.f(2, 4, 5, 8), d.f(2, 4, 5, 8), None, 0.0, True),
    lambda d: (d.f(2, 4, 3, 8), d.f(2, 2, 5, 8), d.f(2, 2, 5, 8), d.f(3, 5), {"enable_gqa": True}),
    lambda d: (d.f(4, 3, 8), d.f(4, 5, 8), d.f(4, 5, 8), d.b(4, 3, 5), {"scale": 0.3}),
    lambda d: (d.f(3, 8), d.f(5, 8), d.f(5, 8)))  # fmt: skip

# -- random: the values differ from PyTorch's -----------------------------------------------------
row("bernoulli.p", lambda d: (d.f(3, 4), 0.3))
row("uniform exponential normal_functional rand_like", lambda d: (d.f(3, 4),))
row("native_dropout dropout feature_dropout alpha_dropout", lambda d: (d.f(3, 4), 0.5, False))
ROWS["aten.native_dropout.default"] += [
    lambda d: (d.f(3, 4), 0.0, True),
    lambda d: (d.f(3, 4), 1.0, True),
]
row("randperm", lambda d: (7,))
row("_assert_async", lambda d: (torch.tensor(True),))
row("_assert_async.msg", lambda d: (torch.tensor(True), "text"))
row("_assert_scalar", lambda d: (True, "text"))
row("_assert_tensor_metadata", lambda d: (d.f(2), [2]))
row("sym_constrain_range sym_constrain_range_for_size", lambda d: (3, {"min": 1, "max": 5}))

# Ops with these words have results that differ by definition: only shape and dtype are compared.
DRAWN = (
    "rand", "bernoulli", "uniform", "normal_functional", "exponential", "multinomial", "empty",
)  # fmt: skip
# Results that PyTorch leaves open, or that other CPUs and GPUs give too, by op and number.
OPEN = {
    "aten.log_sigmoid_forward.default": {1},  # a buffer of the backward pass
    "aten.nll_loss_forward.default": {1},
    "aten.nll_loss2d_forward.default": {1},
    "aten.native_dropout.default": set[int](),
}
# Results after the first that are compared for f32 alone: which of equal elements, and statistics
# in a narrow dtype.
OPEN_UNLESS_F32 = {
    "aten.topk.default", "aten.kthvalue.default", "aten.sort.default", "aten.median.dim",
    "aten.native_layer_norm.default", "aten.native_group_norm.default",
}  # fmt: skip
# Values that others replace have a gradient in PyTorch; its gradient of logcumsumexp is wrong by
# 4e-4 in f32, ours by 1e-7.
NO_GRADIENT = {
    "aten.index_put.default", "aten._unsafe_index_put.default", "aten.logcumsumexp.default",
}  # fmt: skip
# Compared for f32 alone: PyTorch rounds points to bf16, and has products of whole numbers.
WIDE = {"aten.grid_sampler_2d.default", "aten.convolution.default", "aten.addr.default"}
# What a rule refuses, by a part of its text.
REFUSED = {
    "aten.embedding.default": "not scaled by the frequency",
    "aten.scatter_reduce.two": "'prod' has no rule",
    "aten.as_strided.default": "is outside",  # a part of memory around the argument
    "aten.index_put.default": "how many elements a mask names",
}
# Rules without an op of their own to compare with: tests of modules call them.
BY_MODULES = {
    "cond", "while_loop", "scan", "tag_activation_checkpoint", "wrap_activation_checkpoint",
    "wrap_with_autocast", "wrap_with_set_grad_enabled", "tessera.stop_gradient.default",
    "transformers.grouped_mm_fallback.default", "aten.sym_is_contiguous.default",
    "aten._unique2.default", "aten.unique_dim.default",
    "aten.nonzero.default", "aten.masked_select.default", "aten.bincount.default",
}  # fmt: skip
