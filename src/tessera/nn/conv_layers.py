"""Layers of a convolutional network: convolutions and norms over channels."""

from __future__ import annotations

import math

from ..core.checks import flag, number, whole
from ..lang.record.parameter import Parameter
from ..lang.value.checks import typed
from ..lang.value.tensor import Tensor
from . import conv as fn
from .conv import Padding, Size
from .layers import normal
from .module import Module, state


class _Conv(Module):
    """The base class of convolution layers, with the initialization of their weights."""

    turned = False
    weight: Parameter
    bias: Parameter | None

    def _make(
        self, rank: int, inputs: int, outputs: int, kernel: Size, stride: Size, groups: int,
        bias: bool,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        ins, outs = (whole(name, "a number of channels", n, 1) for n in (inputs, outputs))
        count = whole(name, "groups", groups, 1)
        fn.into_groups(name, count, inputs=ins, outputs=outs)
        sizes = fn.spatial(name, "kernel_size", kernel, rank, 1)
        fan_in = ins // count * math.prod(sizes)
        lead = (outs, ins // count)
        if self.turned:  # a step of the stride leaves out all but one in so many terms
            fan_in = max(1, fan_in // math.prod(fn.spatial(name, "stride", stride, rank, 1)))
            lead = (ins, outs // count)
        # He et al. 2015: the factor 2 makes up for the half that a ReLU removes.
        self.weight = Parameter(*lead, *sizes, init=normal(math.sqrt(2.0 / fan_in)))
        self.bias = Parameter(outs, init="zeros") if flag(name, "bias", bias) else None


class Conv1d(_Conv):
    """`nn.conv1d` with weight [out_channels, in_channels / groups, kernel_size] and bias
    [out_channels]."""

    @typed
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1,
        padding: Padding = 0, dilation: Size = 1, groups: int = 1, bias: bool = True,
    ):  # fmt: skip
        self._make(1, in_channels, out_channels, kernel_size, stride, groups, bias)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        return fn.conv1d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class Conv2d(_Conv):
    """`nn.conv2d` with weight [out_channels, in_channels / groups, *kernel_size] and bias
    [out_channels]."""

    @typed
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1,
        padding: Padding = 0, dilation: Size = 1, groups: int = 1, bias: bool = True,
    ):  # fmt: skip
        self._make(2, in_channels, out_channels, kernel_size, stride, groups, bias)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        return fn.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class Conv3d(_Conv):
    """`nn.conv3d` with weight [out_channels, in_channels / groups, *kernel_size] and bias
    [out_channels]."""

    @typed
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1,
        padding: Padding = 0, dilation: Size = 1, groups: int = 1, bias: bool = True,
    ):  # fmt: skip
        self._make(3, in_channels, out_channels, kernel_size, stride, groups, bias)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        return fn.conv3d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class ConvTranspose1d(_Conv):
    """`nn.conv_transpose1d` with weight [in_channels, out_channels / groups, kernel_size]
    and bias [out_channels]."""

    turned = True

    @typed
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1,
        padding: Size = 0, output_padding: Size = 0, groups: int = 1, bias: bool = True,
        dilation: Size = 1,
    ):  # fmt: skip
        self._make(1, in_channels, out_channels, kernel_size, stride, groups, bias)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.groups, self.dilation = groups, dilation

    def __call__(self, x: Tensor) -> Tensor:
        return fn.conv_transpose1d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding,
            groups=self.groups, dilation=self.dilation,
        )  # fmt: skip


class ConvTranspose2d(_Conv):
    """`nn.conv_transpose2d` with weight [in_channels, out_channels / groups, *kernel_size]
    and bias [out_channels]."""

    turned = True

    @typed
    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Size, stride: Size = 1,
        padding: Size = 0, output_padding: Size = 0, groups: int = 1, bias: bool = True,
        dilation: Size = 1,
    ):  # fmt: skip
        self._make(2, in_channels, out_channels, kernel_size, stride, groups, bias)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.groups, self.dilation = groups, dilation

    def __call__(self, x: Tensor) -> Tensor:
        return fn.conv_transpose2d(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding,
            groups=self.groups, dilation=self.dilation,
        )  # fmt: skip


class BatchNorm(Module):
    """`nn.batch_norm` of [N, channels, ...] with weight and bias [channels].

    While `training`, a call also updates the running mean and variance, which are buffers.
    """

    @typed
    def __init__(self, channels: int, *, momentum: float = 0.1, eps: float = 1e-5):
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
        y, new = fn.batch_norm(
            x, running, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        if self.training:
            self.running_mean, self.running_var = new
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
