"""Weights of a model of PyTorch as tensors of TT-NN. Linear layers' weights are transposed, so that
a product needs no other order, and their biases are rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.checks import instance, library, unfit
from .args import check_types
from .device import MeshDevice
from .dtypes import DataType, Layout
from .errors import TTNNError, public
from .op import check_keywords
from .tensor import Tensor
from .transfer import from_torch, to_device


class ParameterDict(dict[str, Any]):
    """Tensors by name, with a dot: `parameters.layer.weight`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no parameter {name!r}; there are {', '.join(self)}")


class ParameterList(list[Any]):
    """Tensors in order."""


@public
def preprocess_linear_weight(
    weight: Any, *, dtype: DataType, layout: Layout = Layout.TILE
) -> Tensor:
    """The weight of a linear layer [out, in], as [in, out]."""
    return from_torch(weight.T.contiguous(), dtype, layout=layout)


@public
def preprocess_linear_bias(bias: Any, *, dtype: DataType, layout: Layout = Layout.TILE) -> Tensor:
    """The bias of a linear layer [out], as [1, out]."""
    return from_torch(bias.reshape((1, -1)), dtype, layout=layout)


@public
def preprocess_layernorm_parameter(
    parameter: Any, *, dtype: DataType, layout: Layout = Layout.TILE
) -> Tensor:
    """The weight or bias of a norm [width], as [1, width]."""
    return from_torch(parameter.reshape((1, -1)), dtype, layout=layout)


def preprocess_model_parameters(
    model_name: str | None = None, *, version: str | None = None,
    initialize_model: Callable[[], Any], convert_to_ttnn: Callable[[Any, str], bool] | None = None,
    custom_preprocessor: Callable[..., dict[str, Any]] | None = None,
    device: MeshDevice | None = None, prefix: str = "", **options: Any,
) -> ParameterDict:  # fmt: skip
    """The weights of the model that `initialize_model` gives, as bfloat16 in tiles, on `device`.

    `custom_preprocessor(model, name, ...)` gives the weights of the parts that it knows, as a dict;
    for others it gives none. A part for which `convert_to_ttnn(part, name)` is false keeps its own
    tensors. A mapper of `with ttnn.distribute(...)` distributes them. Files of
    `model_name` are not kept.
    """
    me = "preprocess_model_parameters"
    check_keywords(preprocess_model_parameters, options)
    torch = library(me, "torch", "torch")
    for word, call, fix in (
        ("initialize_model", initialize_model, "initialize_model=lambda: model"),
        ("convert_to_ttnn", convert_to_ttnn, "convert_to_ttnn=lambda part, name: True"),
        ("custom_preprocessor", custom_preprocessor, "give a function(model, name, ...)"),
    ):
        if not callable(call) and (call is not None or call is initialize_model):
            raise unfit(me, word, call, fix, TTNNError)
    check_types(me, device=device)
    instance(me, "prefix", prefix, str, 'prefix="model"', TTNNError)

    def convert(module: Any, name: str) -> Any:
        if custom_preprocessor is not None:
            try:
                custom = custom_preprocessor(module, name, None, convert_to_ttnn)
            except TypeError:
                custom = custom_preprocessor(module, name)
            if custom:
                return moved(custom)
        keeps = convert_to_ttnn is not None and not convert_to_ttnn(module, name)
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            return ParameterList([convert(m, f"{name}.{i}") for i, m in enumerate(module)])
        converted = ParameterDict()
        for key, child in module.named_children():
            below = convert(child, f"{name}.{key}" if name else key)
            if below:
                converted[key] = below
        for key, parameter in module.named_parameters(recurse=False):
            data = parameter.detach()
            converted[key] = data if keeps else placed(_converted(torch, module, key, data))
        return converted

    def placed(x: Any) -> Any:
        return to_device(x, device) if device is not None and isinstance(x, Tensor) else x

    def moved(tree: Any) -> Any:
        if isinstance(tree, dict):
            return ParameterDict({k: moved(v) for k, v in tree.items()})
        if isinstance(tree, list | tuple):
            return ParameterList([moved(v) for v in tree])
        return placed(tree)

    model = initialize_model()
    fix = "initialize_model=lambda: model, a module of PyTorch"
    instance(me, "initialize_model()", model, torch.nn.Module, fix, TTNNError)
    parameters: ParameterDict = convert(model.eval(), prefix)
    return parameters


def _converted(torch: Any, module: Any, key: str, data: Any) -> Tensor:
    bf16 = DataType.BFLOAT16
    if isinstance(module, torch.nn.Linear) or type(module).__name__ == "FalconLinear":
        make = preprocess_linear_weight if key == "weight" else preprocess_linear_bias
        return make(data, dtype=bf16)
    if data.ndim == 1:
        return preprocess_layernorm_parameter(data, dtype=bf16)
    rows = isinstance(module, torch.nn.Embedding)
    return from_torch(data, bf16, layout=Layout.ROW_MAJOR if rows else Layout.TILE)


__all__ = [
    "ParameterDict",
    "ParameterList",
    "preprocess_layernorm_parameter",
    "preprocess_linear_bias",
    "preprocess_linear_weight",
    "preprocess_model_parameters",
]
