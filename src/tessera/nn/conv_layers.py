"""Layers of a convolutional network: convolutions and norms over channels."""

from __future__ import annotations

import math

from ..core.declared import Count, Flag, Real
from ..lang.record.parameter import Parameter
from ..lang.value.tensor import Tensor
from . import conv as fn
from .conv import Padding, Size
from .layers import normal
from .module import Module, state


class _Conv(Module):
    """The base class of convolution layers, with the initialization of their weights."""

    transposed = False
    weight: Parameter
    bias: Parameter | None

    def _make(
        self, rank: int, ins: int, outs: int, kernel: Size, stride: Size, groups: int,
        bias: bool,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        fn.into_groups(name, groups, inputs=ins, outputs=outs)
        sizes = fn.spatial(name, "kernel_size", kernel, rank, 1)
        fan_in = ins // groups * math.prod(sizes)
        lead = (outs, ins // groups)
        if self.transposed:  # a step of the stride leaves out all but one in so many terms
            fan_in = max(1, fan_in // math.prod(fn.spatial(name, "stride", stride, rank, 1)))
            lead = (ins, outs // groups)
        # He et al. 2015: the factor 2 makes up for the half that a ReLU removes.
        self.weight = Parameter(*lead, *sizes, init=normal(math.sqrt(2.0 / fan_in)))
        self.bias = Parameter(outs, init="zeros") if bias else None


class Conv1d(_Conv):
    """`nn.conv1d` with weight [out_channels, in_channels / groups, kernel_size] and bias
    [out_channels]."""

    def __init__(
        self, in_channels: Count, out_channels: Count, kernel_size: Size, stride: Size = 1,
        padding: Padding = 0, dilation: Size = 1, groups: Count = 1, bias: Flag = True,
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

    def __init__(
        self, in_channels: Count, out_channels: Count, kernel_size: Size, stride: Size = 1,
        padding: Padding = 0, dilation: Size = 1, groups: Count = 1, bias: Flag = True,
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

    def __init__(
        self, in_channels: Count, out_channels: Count, kernel_size: Size, stride: Size = 1,
        padding: Padding = 0, dilation: Size = 1, groups: Count = 1, bias: Flag = True,
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

    transposed = True

    def __init__(
        self, in_channels: Count, out_channels: Count, kernel_size: Size, stride: Size = 1,
        padding: Size = 0, output_padding: Size = 0, groups: Count = 1, bias: Flag = True,
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

    transposed = True

    def __init__(
        self, in_channels: Count, out_channels: Count, kernel_size: Size, stride: Size = 1,
        padding: Size = 0, output_padding: Size = 0, groups: Count = 1, bias: Flag = True,
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

    def __init__(self, channels: Count, *, momentum: Real = 0.1, eps: Real = 1e-5):
        self.weight = Parameter(channels, init="ones")
        self.bias = Parameter(channels, init="zeros")
        self.running_mean = state(channels)
        self.running_var = state(channels, init="ones")
        self.momentum = momentum
        self.eps = eps
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

    def __init__(self, groups: Count, channels: Count, eps: Real = 1e-5):
        self.groups = groups
        fn.into_groups("GroupNorm", self.groups, channels=channels)
        self.weight = Parameter(channels, init="ones")
        self.bias = Parameter(channels, init="zeros")
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return fn.group_norm(x, self.groups, self.weight, self.bias, self.eps)
