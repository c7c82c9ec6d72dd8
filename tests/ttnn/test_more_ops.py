"""Rarer ops of models against PyTorch's, with different parts on each device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as T

from tessera import ttnn
from tests.cases import grid
from tests.ttnn.test_ops import SHAPES, Op, on, same

SMALL = {"acos": torch.acos, "asin": torch.asin, "atanh": torch.atanh, "erfinv": torch.erfinv}
UNARY: dict[str, Op] = {
    "asinh": torch.asinh, "atan": torch.atan, "cosh": torch.cosh, "sinh": torch.sinh,
    "erfc": torch.erfc, "deg2rad": torch.deg2rad, "rad2deg": torch.rad2deg, "frac": torch.frac,
    "signbit": torch.signbit, "isposinf": torch.isposinf, "isneginf": torch.isneginf,
    "sigmoid_accurate": torch.sigmoid, "tanhshrink": T.tanhshrink, "celu": T.celu, "selu": T.selu,
    "hardtanh": T.hardtanh, "hardshrink": T.hardshrink, "softshrink": T.softshrink,
    "cbrt": lambda x: x.sign() * x.abs() ** (1 / 3), "round": torch.round,
    "hardmish": lambda x: x * (x + 2.8).clamp(0, 5) / 5,
}  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), grid([*UNARY, *SMALL, "acosh"], SHAPES))
def test_ops_of_one(name: str, shape: tuple[int, ...], pair: ttnn.MeshDevice) -> None:
    x, want = on(pair, *shape, kind="positive" if name == "acosh" else "normal")
    if name in SMALL:
        x, want = x * 0.15, want * 0.15
    if name == "acosh":
        x, want = x + 1.0, want + 1.0
    same(getattr(ttnn, name)(x), (UNARY | SMALL | {"acosh": torch.acosh})[name](want))


def test_ops_of_one_and_numbers(pair: ttnn.MeshDevice) -> None:
    x, a = on(pair, 3, 8)
    same(ttnn.leaky_relu(x, 0.2), T.leaky_relu(a, 0.2))
    same(ttnn.celu(x, alpha=0.5), T.celu(a, 0.5))
    same(ttnn.selu(x, scale=2.0, alpha=1.0), 2 * T.elu(a))
    same(ttnn.hardtanh(x, -0.3, max_val=0.2), T.hardtanh(a, -0.3, 0.2))
    same(ttnn.softshrink(x, lambd=0.1), T.softshrink(a, 0.1))
    same(ttnn.heaviside(x * 0, 0.5), torch.full_like(a, 0.5))
    same(ttnn.threshold(x, 0.1, 7.0), T.threshold(a, 0.1, 7.0))
    same(ttnn.logit(ttnn.sigmoid(x)), a, 1e-4)
    same(ttnn.logit(x, eps=0.1), torch.logit(a, 0.1))
    same(ttnn.round(x, decimals=1), torch.round(a, decimals=1))
    same(ttnn.rpow(x, 3.0), 3.0**a)
    same(ttnn.fill(x, 2.5), torch.full_like(a, 2.5))
    same(ttnn.polyval(x, [2.0, 0.0, -1.0]), 2 * a**2 - 1)
    same(ttnn.tril(x, diagonal=1), a.tril(1))
    same(ttnn.triu(x), a.triu())
    for name, gate in (("glu", torch.sigmoid), ("reglu", T.relu), ("geglu", T.gelu),
                       ("swiglu", T.silu)):  # fmt: skip
        first, second = a.chunk(2, -1)
        same(getattr(ttnn, name)(x, -1), first * gate(second))
    same(ttnn.exp(x, fast_and_approximate_mode=True), a.exp())
    for call in (lambda: ttnn.threshold(x, 0.1), lambda: ttnn.celu(x, 0.1, 0.2)):
        with pytest.raises(
            ttnn.TTNNError, match=r"(threshold|celu): [^\n]*argument[^\n]*\n(.*\n)*.*fix"
        ):
            call()


BINARY: dict[str, Op] = {
    "atan2": torch.atan2, "hypot": torch.hypot, "ldexp": lambda x, y: x * 2.0**y,
    "logaddexp2": torch.logaddexp2, "floor_div": torch.floor_divide,
    "prelu": lambda x, y: torch.where(x > 0, x, x * y),
    "bias_gelu": lambda x, y: T.gelu(x + y), "isclose": torch.isclose,
    "div_no_nan": lambda x, y: torch.where(y == 0, 0.0, x / y),
}  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), grid(BINARY, SHAPES))
def test_ops_of_two(name: str, shape: tuple[int, ...], pair: ttnn.MeshDevice) -> None:
    (x, a), (y, b) = on(pair, *shape), on(pair, *shape)
    same(getattr(ttnn, name)(x, y), BINARY[name](a, b))
    same(getattr(ttnn, name)(x, 1.5), BINARY[name](a, torch.tensor(1.5)))


def test_ops_of_two_with_more(pair: ttnn.MeshDevice) -> None:
    (x, a), (y, b), (z, c) = on(pair, 3, 8), on(pair, 3, 8), on(pair, 3, 8, kind="positive")
    for mode in ("floor", "trunc", None):
        same(ttnn.div(x, z, round_mode=mode), torch.div(a, c, rounding_mode=mode))
        same(ttnn.rdiv(z, 2.0, round_mode=mode), torch.div(2.0, c, rounding_mode=mode))
    same(ttnn.addalpha(x, y, 0.5), torch.add(a, b, alpha=0.5))
    same(ttnn.subalpha(x, y, alpha=0.5), torch.sub(a, b, alpha=0.5))
    same(ttnn.isclose(x, y, rtol=0.5, atol=0.1), torch.isclose(a, b, 0.5, 0.1))
    same(ttnn.xlogy(x * 0, z - z), torch.xlogy(a * 0, c * 0))
    same(ttnn.xlogy(x, z), torch.xlogy(a, c))
    same(ttnn.lerp(x, y, 0.3), torch.lerp(a, b, 0.3))
    same(ttnn.lerp(x, y, z), torch.lerp(a, b, c))
    same(ttnn.mac(x, y, 2.0), a * b + 2)
    same(ttnn.mac(x, y, z), a * b + c)
    same(ttnn.addcmul(x, y, z, value=2.0), torch.addcmul(a, b, c, value=2))
    same(ttnn.addcdiv(x, y, z), torch.addcdiv(a, b, c))
    for name, loss in (("mse_loss", T.mse_loss), ("l1_loss", T.l1_loss)):
        same(getattr(ttnn, name)(x, y), loss(a, b, reduction="none"))
        for how in ("SUM", "MEAN"):
            want = torch.stack([loss(a[k], b[k], reduction=how.lower()) for k in (0, 1)])
            same(getattr(ttnn, name)(x, y, reduction=ttnn.LossReductionMode[how]), want)
    handle = x
    assert ttnn.gt_(x, y) is handle
    same(handle, a > b)
    i, d = on(pair, 3, 8, kind="int", dtype=ttnn.int32)
    same(ttnn.remainder(i - 20, 7), torch.remainder(d - 20, 7))
    same(ttnn.floor_div(i - 20, 7), torch.floor_divide(d - 20, 7))
    shifted = ttnn.logical_right_shift(i - 20, 3)
    same(shifted, torch.from_numpy(((d - 20).numpy().view(np.uint32) >> 3).view(np.int32)))
    with pytest.raises(ttnn.TTNNError, match="there is no round_mode 'up'"):
        ttnn.div(x, y, round_mode="up")
    with pytest.raises(ttnn.TTNNError, match="add: too many positional arguments"):
        ttnn.add(x, y, 3)


def test_norms_of_planes_and_masks(pair: ttnn.MeshDevice) -> None:
    x, a = on(pair, 2, 3, 8, 8)
    for name in ("std", "var"):
        same(getattr(ttnn, f"{name}_hw")(x), getattr(torch, name)(a, (-2, -1), keepdim=True))
    plane = (a - a.mean((-2, -1), True)) / a.std((-2, -1), keepdim=True)
    same(ttnn.normalize_hw(x), plane)
    every = torch.stack([(p - p.mean()) / p.std() for p in a])
    same(ttnn.normalize_global(x), every)
    same(ttnn.cumprod(x, dim=1), a.cumprod(2))
    same(ttnn.cumsum(x, dim=1, reverse_order=True), a.flip(2).cumsum(2).flip(2))
    mask, m = on(pair, 1, 1, 8, 8)
    want = (a * 0.5 + m).softmax(-1)
    same(ttnn.scale_mask_softmax(x, 0.5, mask, is_causal_mask=True), want)
    handle = x
    assert ttnn.scale_mask_softmax_in_place(x, 0.5, mask) is handle
    same(handle, want)
    assert ttnn.softmax_in_place(x, dim=-1, numeric_stable=True) is handle
    same(handle, want.softmax(-1))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_places(dim: int, pair: ttnn.MeshDevice) -> None:
    x, a = on(pair, 5, 6, 7)
    along = dim + 1 if dim >= 0 else -1
    same(ttnn.argmin(x, dim, keepdim=True), a.argmin(along, keepdim=True))
    for down in (False, True):
        for got, want in zip(ttnn.sort(x, dim, down), a.sort(along, down), strict=True):
            same(got, want)
    (ids, i), (src, s) = on(pair, 4, 4, 4, kind="int", dtype=ttnn.uint32), on(pair, 4, 6, 7)
    ids, i = ttnn.remainder(ids, 5), i.remainder(5).long()
    same(ttnn.gather(x, dim, ids), a.gather(along, i))
    same(ttnn.scatter_add(x, dim, ids, src), a.scatter_add(along, i, s))
    each = torch.argsort(torch.rand(2, 4, 4, 5), -1)[..., :4]  # no place twice in a row
    each = each.movedim(-1, along)
    cut = ttnn.ShardTensorToMesh(pair, 0)
    at = ttnn.from_torch(each.reshape(8, 4, 4).int(), device=pair, mesh_mapper=cut)
    same(ttnn.scatter(x, dim, at, src), a.scatter(along, each, s))
    same(ttnn.roll(x, 2, dim), a.roll(2, along))
    last = ttnn.scatter(x, dim, at * 0, src)
    same(last, a.scatter(along, (each * 0).narrow(along, 0, 1), s.narrow(along, 3, 1)))


def test_a_place_beyond_16_bits(pair: ttnn.MeshDevice) -> None:
    x = torch.zeros(1, 70_000)
    x[0, 69_999] = 1
    there = ttnn.from_torch(x, device=pair)
    values, places = ttnn.topk(there, 1)
    assert places.dtype is ttnn.uint32
    assert ttnn.get_device_tensors(places)[1].to_list() == [[69_999]]
    assert ttnn.get_device_tensors(values)[1].to_list() == [[1.0]]


def test_copies_and_places_in_place(pair: ttnn.MeshDevice) -> None:
    x, a = on(pair, 2, 3)
    y = ttnn.zeros_like(x)
    assert ttnn.copy(x, y) is y
    same(y, a)
    z = ttnn.assign(x, dtype=ttnn.bfloat16)
    same(z, a.bfloat16())
    assert ttnn.assign(y, z) is z and ttnn.move(z) is z
    config = ttnn.L1_MEMORY_CONFIG
    assert ttnn.get_memory_config(ttnn.reallocate(z, config)) == config
    at = ttnn.from_torch(np.array([4, -1], np.int32), device=pair)
    ttnn.plus_one(at, skip_negative_entries=True)
    assert ttnn.get_device_tensors(at)[0].to_list() == [5, -1]
    ttnn.plus_one(at)
    assert ttnn.get_device_tensors(at)[0].to_list() == [6, 0]


def test_settings_are_kept_and_checked(pair: ttnn.MeshDevice) -> None:
    with ttnn.manage_config("throw_exception_on_fallback", True):
        assert ttnn.CONFIG.throw_exception_on_fallback
        assert "throw_exception_on_fallback=True" in repr(ttnn.CONFIG)
    assert not ttnn.CONFIG.throw_exception_on_fallback
    with pytest.raises(ttnn.TTNNError, match=r"no 'enable_loging'\n.*\n.*enable_logging"):
        ttnn.CONFIG.enable_loging = True
    ttnn.SetDefaultDevice(pair)
    assert ttnn.GetDefaultDevice() is pair
    ttnn.SetDefaultDevice(None)
    kinds: Any = ttnn.cluster.ClusterType
    assert ttnn.cluster.get_cluster_type() in kinds
