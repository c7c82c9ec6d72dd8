"""TT-NN's mesh API on any machine: `import tessera.ttnn as ttnn`.

Programs that are written for meshes of Tenstorrent devices run as they are, on the devices of this
machine (docs/ttnn.md). A tensor is one of Tessera's, each device's own; ops, collectives and
replayed traces are programs of the same engine.

In the order in which to read it:

- the table: op.py has the caller of all ops, and elementwise.py, movement.py, indexing.py,
  products.py, transformer.py, ccl.py and experimental.py have the rows
- devices: shapes.py, system.py, device.py, lifecycle.py
- tensors: dtypes.py, mapping.py, tensor.py, transfer.py, shards.py, create.py
- around them: trace.py, show.py, model_preprocessing.py, testing.py
- kept and shown: configs.py, hardware.py
- arguments and errors: args.py, errors.py, names.py
"""

import types as _types
from typing import Any

from . import ccl as collectives
from . import (
    device,
    elementwise,
    errors,
    experimental,
    indexing,
    model_preprocessing,
    movement,
    names,
    products,
    show,
    tensor,
    transfer,
    transformer,
)
from .configs import *
from .create import *
from .device import *
from .dtypes import *
from .dtypes import DataType, Layout
from .errors import TTNNError
from .hardware import *
from .lifecycle import *
from .mapping import *
from .shapes import *
from .shards import *
from .show import *
from .tensor import *
from .trace import *
from .transfer import *
from .transformer import fill_cache, update_cache

# Element types and layouts by the names that programs use.
bfloat16, float32, uint32 = DataType.BFLOAT16, DataType.FLOAT32, DataType.UINT32
int32, uint16, uint8 = DataType.INT32, DataType.UINT16, DataType.UINT8
bfloat8_b, bfloat4_b = DataType.BFLOAT8_B, DataType.BFLOAT4_B
TILE_LAYOUT, ROW_MAJOR_LAYOUT = Layout.TILE, Layout.ROW_MAJOR
kv_cache = transformer
globals().update(elementwise.OPS)
for _module in (elementwise, movement, products, indexing, collectives):
    globals().update(errors.publics(vars(_module)))

__all__ = [
    *(n for n, v in globals().items() if n[0] != "_" and not isinstance(v, _types.ModuleType)
      and n not in ("TTNNError", "fill_cache", "update_cache")),
    "TTNNError", "experimental", "fill_cache", "kv_cache", "model_preprocessing", "transformer",
    "update_cache",
]  # fmt: skip

# Methods of tensors that are above the class.
for _name, _method in {
    "__getitem__": movement.getitem, "__repr__": show.tensor_text,
    "__array__": transfer.as_array, "__float__": lambda self: float(transfer.only(self)),
    "__int__": lambda self: int(transfer.only(self)),
    "__bool__": lambda self: bool(transfer.only(self)), "to": transfer.to,
    "to_torch": transfer.to_torch, "numpy": transfer.numpy, "item": transfer.item,
    "to_list": transfer.to_list,
}.items():  # fmt: skip
    setattr(tensor.Tensor, _name, _method)
for _name, _op in {
    "__add__": "add", "__radd__": "add", "__sub__": "subtract", "__mul__": "multiply",
    "__rmul__": "multiply", "__truediv__": "divide", "__rsub__": "rsub", "__rtruediv__": "rdiv",
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
    "__pow__": "pow", "__neg__": "neg", "__matmul__": "matmul", "reshape": "reshape",
}.items():  # fmt: skip
    setattr(tensor.Tensor, _name, globals()[_op])

# Each public function's errors are TTNNErrors, whatever it is given.
for _class in (tensor.Tensor, device.MeshDevice, device.SubDeviceManagers):
    for _name, _call in errors.functions(vars(_class)).items():
        setattr(_class, _name, errors.public(_call))
globals().update({n: errors.public(f) for n, f in errors.functions(globals()).items()})


def __getattr__(name: str) -> Any:
    raise names.no_name(name, __all__)
