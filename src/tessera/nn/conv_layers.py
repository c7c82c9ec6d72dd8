"""The layers of a convolutional network: convolutions and the norms over channels."""

from __future__ import annotations

import math

from ..core.checks import flag, number, whole
from ..core.renamed import renamed_arguments
from ..lang.checks import typed
from ..lang.parameter import Parameter
from ..lang.tensor import Tensor
from . import conv as fn
from .conv import Padding, Size
from .layers import normal
from .module import Module, state

OLD_NAMES = {"inputs": "in_channels", "outputs": "out_channels", "kernel": "kernel_size"}


def _init(name: str, inputs: int, outputs: int, kernel: Size, groups: int, rank: int) -> Tensor:
    ins, outs = (whole(name, "a number of channels", n, 1) for n in (inputs, outputs))
    count = whole(name, "groups", groups, 1)
    fn.into_groups(name, count, inputs=ins, outputs=outs)
    sizes = fn.spatial(name, "kernel_size", kernel, rank, 1)
    fan_in = ins // count * math.prod(sizes)
    # He et al. 2015: what a ReLU halves is put back.
    return Parameter(outs, ins // count, *sizes, init=normal(math.sqrt(2.0 / fan_in)))


class Conv1d(Module):
    """`nn.conv1d` with weight [out_channels, in_channels / groups, kernel_size] and bias
    [out_channels]."""

    @renamed_arguments("nn.Conv1d", **OLD_NAMES)
    @typed
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1,
        padding: Padding = 0, dilation: Size = 1, groups: int = 1, bias: bool = True,
    ):  # fmt: skip
        self.weight = _init("Conv1d", in_channels, out_channels, kernel_size, groups, 1)
        with_bias = flag("Conv1d", "bias", bias)
        self.bias = Parameter(out_channels, init="zeros") if with_bias else None
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        return fn.conv1d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class Conv2d(Module):
    """`nn.conv2d` with weight [out_channels, in_channels / groups, *kernel_size] and bias
    [out_channels]."""

    @renamed_arguments("nn.Conv2d", **OLD_NAMES)
    @typed
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1,
        padding: Padding = 0, dilation: Size = 1, groups: int = 1, bias: bool = True,
    ):  # fmt: skip
        self.weight = _init("Conv2d", in_channels, out_channels, kernel_size, groups, 2)
        with_bias = flag("Conv2d", "bias", bias)
        self.bias = Parameter(out_channels, init="zeros") if with_bias else None
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        return fn.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class BatchNorm(Module):
    """`nn.batch_norm` of [N, channels, ...] with weight and bias [channels].

    While `training`, a call also updates the running mean and variance, which are buffers.
    """

    @typed
    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5):
        c = whole("BatchNorm", "channels", channels, 1)
        self.weight = Parameter(c, init="ones")
        self.bias = Parameter(c, init="zeros")
        self.running_mean = state(c)
        self.running_var = state(c, init="ones")
        self.momentum = number("BatchNorm", "momentum", momentum)
        self.eps = number("BatchNorm", "eps", eps)
        self.training = True

    def __call__(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        y, (self.running_mean, self.running_var) = fn.batch_norm(
            x, running, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return y


class GroupNorm(Module):
    """`nn.group_norm` of [N, channels, ...] in `groups` groups, with weight and bias [channels]."""

    @typed
    def __init__(self, groups: int, channels: int, eps: float = 1e-5):
        c = whole("GroupNorm", "channels", channels, 1)
        self.groups = whole("GroupNorm", "groups", groups, 1)
        fn.into_groups("GroupNorm", self.groups, channels=c)
        self.weight = Parameter(c, init="ones")
        self.bias = Parameter(c, init="zeros")
        self.eps = number("GroupNorm", "eps", eps)

    def __call__(self, x: Tensor) -> Tensor:
        return fn.group_norm(x, self.groups, self.weight, self.bias, self.eps)
