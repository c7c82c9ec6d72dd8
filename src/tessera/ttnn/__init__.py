"""TT-NN's mesh API on any machine: `import tessera.ttnn as ttnn`.

Programs that are written for meshes of Tenstorrent devices run as they are, on the devices of this
machine (docs/ttnn.md). A tensor is one of Tessera's, each device's own; ops, collectives and
replayed traces are programs of the same engine.
"""

from types import FunctionType

from . import (
    arithmetic,
    ccl,
    cluster,
    configs,
    create,
    device,
    distribution,
    dtypes,
    elementwise,
    experimental,
    experts,
    guard,
    hardware,
    mapping,
    model_preprocessing,
    movement,
    names,
    opening,
    parts,
    picking,
    processes,
    products,
    shapes,
    show,
    subdevices,
    tensor,
    trace,
    transfer,
    transformer,
)
from .arithmetic import *
from .caches import fill_cache, update_cache
from .ccl import *
from .configs import *
from .create import *
from .device import *
from .distribution import *
from .dtypes import *
from .dtypes import DataType, Layout
from .elementwise import *
from .experts import *
from .faults import TTNNError
from .hardware import *
from .mapping import *
from .movement import *
from .opening import *
from .parts import *
from .picking import *
from .processes import *
from .products import *
from .shapes import *
from .show import *
from .subdevices import *
from .tensor import *
from .trace import *
from .transfer import *

# Element types and layouts by the names that programs use.
bfloat16, float32, uint32 = DataType.BFLOAT16, DataType.FLOAT32, DataType.UINT32
int32, uint16, uint8 = DataType.INT32, DataType.UINT16, DataType.UINT8
bfloat8_b, bfloat4_b = DataType.BFLOAT8_B, DataType.BFLOAT4_B
TILE_LAYOUT, ROW_MAJOR_LAYOUT = Layout.TILE, Layout.ROW_MAJOR
kv_cache = transformer
globals().update(elementwise.OPS | arithmetic.OPS)

__all__ = [
    *(
        name
        for module in (
            arithmetic, ccl, configs, create, device, distribution, dtypes, elementwise, experts,
            hardware, mapping, movement, opening, parts, picking, processes, products, shapes, show,
            subdevices, tensor, trace, transfer,
        )
        for name in module.__all__
    ),
    *elementwise.OPS,
    *arithmetic.OPS,
    "ROW_MAJOR_LAYOUT", "TILE_LAYOUT", "TTNNError", "bfloat16", "bfloat4_b",
    "bfloat8_b", "cluster", "experimental", "fill_cache", "float32", "int32", "kv_cache",
    "model_preprocessing", "transformer", "uint16", "uint32", "uint8", "update_cache",
]  # fmt: skip

# Each public function's errors are ours, whatever it is given; the one that is left out calls the
# user's functions, whose errors are theirs, and checks its arguments itself.
for _where, _prefix in (
    (globals(), ""), (vars(transformer), "transformer."), (vars(experimental), "experimental."),
    (vars(model_preprocessing), "model_preprocessing."),
):  # fmt: skip
    for _name in _where["__all__"]:
        if isinstance(_where[_name], FunctionType) and _name != "preprocess_model_parameters":
            _where[_name] = guard.guarded(_prefix + _name, _where[_name])

for _class in (tensor.Tensor, device.MeshDevice, subdevices.SubDeviceManagers):
    for _name, _method in [*vars(_class).items()]:
        if isinstance(_method, FunctionType) and not _name.startswith("_"):
            setattr(_class, _name, guard.guarded(f"{_class.__name__}.{_name}", _method))


def __getattr__(name: str) -> object:
    raise names.no_name(name, __all__)
