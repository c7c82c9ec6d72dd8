"""Convolutions, pooling, norms and resizing: values and layouts on a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn
from tessera.core.dtypes import f32
from tessera.core.errors import DTypeError, ShapeError, TesseraError, UsageError
from tessera.core.layout import parse_type, plain
from tessera.core.mesh import Mesh
from tessera.ir.graph.build import Builder
from tessera.ir.graph.oracle import computed
from tessera.ops.op import op_named
from tessera.passes.differentiate import differentiate
from tests.core.numpy_engine import Oracle

MESH = Mesh(("dp", "tp"), shape={"dp": 2, "tp": 4})
ONE = {"stride": (1,), "pads": ((1, 1),), "dilation": (1,), "spread": (1,)}
RNG = np.random.default_rng(5)


def real(*shape: int) -> Any:
    return RNG.uniform(-2, 2, shape).astype(np.float32)


def close(got: ts.Tensor, want: Any, tol: float = 1e-5) -> None:
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got.numpy(), want, rtol=tol, atol=tol)


# ---- layouts -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("x", "w", "out"),
    [
        ("f32[8@dp, 1, 4, 6]", "f32[1, 8, 4, 3]", "f32[8@dp, 1, 8, 6]"),
        ("f32[8@dp, 1, 4, 6]", "f32[1, 8@tp, 4, 3]", "f32[8@dp, 1, 8@tp, 6]"),
        ("f32[8@dp, 1, 4@tp, 6]", "f32[1, 8, 4@tp, 3]", "f32[8@dp, 1, 8, 6] +tp"),
        ("f32[8@dp, 4@tp, 2, 6]", "f32[4@tp, 8, 2, 3]", "f32[8@dp, 4@tp, 8, 6]"),
        ("f32[8, 1, 4, 6@tp]", "f32[1, 8, 4, 3]", "f32[8, 1, 8, 6]"),
        ("f32[8, 1, 4, 6] +dp", "f32[1, 8, 4, 3]", "f32[8, 1, 8, 6] +dp"),
    ],
)
def test_how_a_convolution_lies(x: str, w: str, out: str) -> None:
    b = Builder()
    node = b("conv", *(b.input(parse_type(t, MESH)) for t in (x, w)), **ONE)
    assert node.type.text == out


def test_the_gradient_of_a_weight_is_partial_over_the_batch() -> None:
    b = Builder()
    x, w = (b.input(parse_type(t, MESH)) for t in ("f32[8@dp, 1, 4, 6]", "f32[1, 8@tp, 4, 3]"))
    y = b("conv", x, w, **ONE)
    dx, dw = differentiate(b, [(y, y)], [x, w])
    assert dx is not None and dw is not None
    assert dw.type.text == "f32[1, 8@tp, 4, 3] +dp"
    assert dx.type.text == "f32[8@dp, 1, 4, 6] +tp"
    assert {n.op for n in b.nodes} <= {"input", "conv", "transpose", "flip"}


def test_a_split_batch_takes_one_sum_for_each_statistic() -> None:
    x = dist.tensor((16, 4, 3, 3), layout="[16@dp, 4, 3, 3]", mesh=MESH)
    norm = nn.BatchNorm(4)
    graph = ts.graph.trace(lambda x: norm(x), x, reduce_partial=False)
    found = [(n.op, n.attrs["axes"], n.type.shape) for n, _ in graph.collectives()]
    assert found == [("all_reduce", ("dp",), (1, 4, 1, 1))] * 2


def test_flops_of_a_convolution() -> None:
    b = Builder()
    x, w = b.input(plain(f32, (2, 3, 4, 7))), b.input(plain(f32, (3, 5, 4, 3)))
    y = b("conv", x, w, **ONE)
    assert b.graph([y]).flops == 2 * (2 * 3 * 5 * 7) * (4 * 3)


# ---- second derivatives ------------------------------------------------------------------------
def test_the_gradient_of_a_gradient() -> None:
    # h = Σ (∂/∂x Σ v · conv(x, w))² depends on w alone; its gradient against differences.
    shapes = [(2, 2, 2, 5), (2, 3, 2, 3)]
    b = Builder()
    x, w = (b.input(plain(f32, s)) for s in shapes)
    how = {**ONE, "stride": (2,)}
    y = b("conv", x, w, **how)
    v = b.input(y.type)
    (dx,) = differentiate(b, [(y, v)], [x])
    assert dx is not None
    h = b("sum", b("mul", dx, dx), dims=(0, 1, 2, 3))
    one = b("full", dtype=f32, shape=(), value=1.0)
    (dw,) = differentiate(b, [(h, one)], [w])
    assert dw is not None
    graph = b.graph([h, dw])
    values = [RNG.normal(size=s) for s in (*shapes, y.type.shape)]
    _, got = computed(graph, values)
    for at in [(0, 0, 0, 0), (1, 2, 1, 2), (0, 1, 1, 1)]:
        sides = []
        for step in (1e-6, -1e-6):
            moved = [v.copy() for v in values]
            moved[1][at] += step
            sides.append(computed(graph, moved)[0])
        np.testing.assert_allclose(got[at], (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-6)


# ---- values ------------------------------------------------------------------------------------
def by_hand(x: Any, w: Any, stride: int, pads: tuple[int, int], groups: int) -> Any:
    wide = np.pad(x, [(0, 0), (0, 0), pads, pads])
    k, per, outs = w.shape[-1], w.shape[1], len(w) // groups
    count = (wide.shape[-1] - k) // stride + 1
    out = np.zeros((len(x), len(w), count, count))
    for o, i, j in np.ndindex(*out.shape[1:]):
        first = o // outs * per
        part = wide[:, first : first + per, i * stride : i * stride + k, j * stride :][..., :k]
        out[:, o, i, j] = (part * w[o]).sum((1, 2, 3))
    return out


def test_conv2d(oracle: Oracle) -> None:
    x, w, b = real(2, 4, 6, 6), real(6, 2, 3, 3), real(6)
    for stride, padding, pads in ((1, "same", (1, 1)), (2, 1, (1, 1)), (2, "valid", (0, 0))):
        want = by_hand(x, w, stride, pads, 2) + b[:, None, None]
        close(nn.conv2d(x, w, b, stride, padding, groups=2), want)
    even = real(3, 4, 2, 2)
    close(nn.conv2d(x, even, padding="same"), by_hand(x, even, 1, (0, 1), 1))


def test_conv1d_is_conv2d_of_a_flat_image(oracle: Oracle) -> None:
    x, w, b = real(2, 4, 9), real(6, 4, 3), real(6)
    flat = nn.conv2d(x[:, :, None], w[:, :, None], b, (1, 2), (0, 1), (1, 2))
    close(nn.conv1d(x, w, b, 2, 1, 2), flat.numpy()[:, :, 0])


def test_a_transposed_convolution_is_the_transpose(oracle: Oracle) -> None:
    # <conv(x), y> = <x, conv_transpose(y)>, for every x and y.
    x, w = real(2, 4, 8, 7), real(6, 2, 3, 2)
    how: dict[str, Any] = {"stride": (3, 2), "padding": 1, "dilation": 2, "groups": 2}
    y = nn.conv2d(x, w, **how)
    back = real(*y.shape)
    short = [(n + 2 - 2 * (k - 1) - 1) % s for n, k, s in zip((8, 7), (3, 2), (3, 2), strict=True)]
    up = nn.conv_transpose2d(back, w, output_padding=short, **how)
    assert up.shape == x.shape
    np.testing.assert_allclose((up.numpy() * x).sum(), (y.numpy() * back).sum(), rtol=1e-4)


def test_pooling(oracle: Oracle) -> None:
    x = real(2, 3, 6, 4)
    blocks = x.reshape(2, 3, 3, 2, 2, 2)
    close(nn.max_pool2d(x, 2), blocks.max((3, 5)))
    close(nn.avg_pool2d(x, 2), blocks.mean((3, 5)))
    line = -1 - np.abs(real(1, 1, 5))
    wide = np.pad(line, [(0, 0), (0, 0), (1, 1)], constant_values=-9)
    close(nn.max_pool1d(line, 3, 2, 1), [[[wide[0, 0, i : i + 3].max() for i in (0, 2, 4)]]])
    zero = np.pad(line, [(0, 0), (0, 0), (1, 1)])
    close(nn.avg_pool1d(line, 3, 2, 1), [[[zero[0, 0, i : i + 3].mean() for i in (0, 2, 4)]]])


def test_the_first_of_equal_maxima_has_the_gradient(oracle: Oracle) -> None:
    x = ts.tensor(np.array([[[0.0, 3.0, 3.0, 0.0, 0.0]]]))
    (g,) = ts.grad(nn.max_pool1d(x, 3, 1, 1).sum(), [x])
    # Windows from -1: (·, 0, 3), (0, 3, 3), (3, 3, 0), (3, 0, 0), (0, 0, ·).
    assert g.numpy().tolist() == [[[0, 3, 1, 1, 0]]]


def test_batch_norm_in_training_and_after(oracle: Oracle) -> None:
    x, mean, var, w, b = real(5, 3, 2), real(3), np.abs(real(3)), real(3), real(3)
    here, spread = x.mean((0, 2)), x.var((0, 2))
    y, (new_mean, new_var) = nn.batch_norm(x, (mean, var), w, b, momentum=0.25)
    line = (3, 1)
    close(y, (x - here.reshape(line)) / np.sqrt(spread + 1e-5).reshape(line) * w.reshape(line)
          + b.reshape(line))  # fmt: skip
    close(new_mean, 0.75 * mean + 0.25 * here)
    close(new_var, 0.75 * var + 0.25 * spread * 10 / 9)
    y, (same, _) = nn.batch_norm(x, (mean, var), training=False)
    close(y, (x - mean.reshape(line)) / np.sqrt(var + 1e-5).reshape(line))
    assert same.numpy().tolist() == mean.tolist()


def test_running_statistics_are_state_and_no_weights(oracle: Oracle) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            self.parts = [nn.Conv2d(2, 3, 3), nn.BatchNorm(3), nn.Dropout(0.5)]

        def __call__(self, x: ts.Tensor) -> ts.Tensor:
            for part in self.parts:
                x = part(x)
            return x

    net = Net()
    weights = ["parts.0.weight", "parts.0.bias", "parts.1.weight", "parts.1.bias"]
    state = ["parts.1.running_mean", "parts.1.running_var"]
    assert list(net.parameters()) == weights
    assert list(net.state_dict()) == weights + state

    @ts.jit
    def run(net: Net, x: ts.Tensor) -> ts.Tensor:
        return net(x)

    x = ts.tensor(real(4, 2, 6, 6))
    before = net.parts[1].running_mean.numpy()  # type: ignore[union-attr]
    run(net, x)
    moved = net.state_dict()["parts.1.running_mean"].numpy()
    assert (moved != before).all()
    other = Net()
    other.load_parameters(net.state_dict())
    assert (other.state_dict()[state[0]].numpy() == moved).all()
    assert net.train(False) is net
    first, again = run(net, x).numpy(), run(other.train(False), x).numpy()
    assert (first == again).all()
    assert (net.state_dict()[state[0]].numpy() == moved).all()
    with pytest.raises(UsageError):
        net.train("no")  # type: ignore[arg-type]


def test_group_norm(oracle: Oracle) -> None:
    x, w, b = real(2, 6, 4), real(6), real(6)
    parts = x.reshape(2, 3, 8)
    want = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + 1e-5)
    close(nn.group_norm(x, 3, w, b), want.reshape(x.shape) * w[:, None] + b[:, None])
    close(nn.GroupNorm(3, 6)(ts.tensor(x)), want.reshape(x.shape))


def test_interpolate(oracle: Oracle) -> None:
    x = np.array([[[0.0, 4.0]]], np.float32)
    assert nn.interpolate(x, 4).numpy().tolist() == [[[0, 0, 4, 4]]]
    assert nn.interpolate(x, 4, "linear").numpy().tolist() == [[[0, 1, 3, 4]]]
    assert nn.interpolate(x, 1, "linear").numpy().tolist() == [[[2]]]
    image = real(2, 3, 4, 6)
    close(nn.interpolate(image, (2, 3)), image[:, :, ::2, ::2])
    close(nn.interpolate(image, (2, 3), "bilinear"), image.reshape(2, 3, 2, 2, 3, 2).mean((3, 5)))


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_narrow_floats_stay_narrow(name: str, oracle: Oracle) -> None:
    dtype = getattr(ts, name)
    x, w = ts.tensor(real(2, 4, 6, 6), dtype=dtype), ts.tensor(real(4, 4, 3, 3), dtype=dtype)
    ones, zeros = ts.ones(4), ts.zeros(4)
    for y in (
        nn.conv2d(x, w), nn.conv_transpose2d(x, w), nn.max_pool2d(x, 2), nn.avg_pool2d(x, 2),
        nn.batch_norm(x, (zeros, ones), ones, zeros)[0], nn.group_norm(x, 2, ones, zeros),
        nn.interpolate(x, (3, 9), "linear"),
    ):  # fmt: skip
        assert y.dtype is dtype
    with ts.autocast(dtype):
        assert nn.conv2d(x.to(ts.f32), w.to(ts.f32)).dtype is dtype


# ---- what is refused ---------------------------------------------------------------------------
IMAGE = np.zeros((2, 4, 6, 6), np.float32)
KERNEL = np.zeros((6, 4, 3, 3), np.float32)
WRONG: list[tuple[Any, type[TesseraError], str]] = [
    (lambda: nn.conv2d(IMAGE[0], KERNEL), ShapeError, "conv2d: x has 3 dims, not 4"),
    (lambda: nn.conv2d(IMAGE, KERNEL, groups=2), ShapeError,
     "conv2d: 4 channels in 2 groups do not fit the weight"),
    (lambda: nn.conv2d(IMAGE, KERNEL, padding="full"), UsageError,
     "conv2d: padding 'full' with stride (1, 1) is not known"),
    (lambda: nn.conv2d(IMAGE, KERNEL, stride=2, padding="same"), UsageError,
     "conv2d: padding 'same' with stride (2, 2) is not known"),
    (lambda: nn.conv2d(IMAGE, KERNEL, stride=(1, 1, 1)), UsageError,
     "conv2d: stride cannot be (1, 1, 1)"),
    (lambda: nn.conv2d(IMAGE, KERNEL, dilation=4), ShapeError,
     "conv: (-2, -2) is no size of an output"),
    (lambda: nn.conv2d(IMAGE, KERNEL, KERNEL), ShapeError,
     "conv2d: bias has shape (6, 4, 3, 3), not (6,)"),
    (lambda: nn.conv_transpose2d(IMAGE, KERNEL), ShapeError,
     "conv_transpose2d: 4 channels in 1 groups do not fit the weight"),
    (lambda: nn.max_pool2d(IMAGE, 2, padding=2), UsageError,
     "max_pool2d: padding (2, 2) is more than half of the window (2, 2)"),
    (lambda: nn.avg_pool2d(IMAGE, 9), ShapeError,
     "window: the window is larger than the padded input"),
    (lambda: nn.batch_norm(np.ones((1, 3, 1, 1)), (np.zeros(3), np.ones(3))), UsageError,
     "batch_norm: one value per channel has no variance to train with"),
    (lambda: nn.batch_norm(IMAGE, IMAGE), UsageError, "batch_norm: running cannot be "),
    (lambda: nn.group_norm(IMAGE, 3), ShapeError,
     "group_norm: 4 channels do not divide into 3 groups"),
    (lambda: nn.interpolate(IMAGE, 3, "cubic"), UsageError,
     "interpolate: mode 'cubic' is not known for 2 spatial dims"),
    (lambda: nn.Conv2d(3, 4, 3, groups=2), ShapeError,
     "Conv2d: 3 inputs do not divide into 2 groups"),
    (lambda: nn.GroupNorm(3, 4), ShapeError,
     "GroupNorm: 4 channels do not divide into 3 groups"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "says"), WRONG)
def test_what_is_refused(call: Any, kind: type[TesseraError], says: str, oracle: Oracle) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value).startswith(says)
    assert "\n  fix" in str(error.value)


REFUSED: list[tuple[str, list[str], dict[str, Any], type[TesseraError], str]] = [
    ("conv", ["f32[8, 1, 4, 6]", "bf16[1, 8, 4, 3]"], ONE, DTypeError,
     "conv: arguments have different dtypes"),
    ("conv", ["f32[8, 2, 4, 6]", "f32[1, 8, 4, 3]"], ONE, ShapeError,
     "conv: the shapes of x and w do not fit"),
    ("conv", ["f32[8, 1, 4]", "f32[1, 8, 4]"], ONE, ShapeError,
     "conv: the shapes of x and w do not fit"),
    ("window", ["i32[8]"], {"kind": "sum", "size": (2,), "stride": (1,), "pads": ((0, 0),)},
     DTypeError, "window: takes float tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "ins", "attrs", "kind", "says"), REFUSED)
def test_what_the_ops_refuse(
    op: str, ins: list[str], attrs: dict[str, Any], kind: type[TesseraError], says: str
) -> None:
    with pytest.raises(kind) as error:
        op_named(op).rule(tuple(parse_type(t, MESH) for t in ins), attrs)
    assert str(error.value).startswith(says)
