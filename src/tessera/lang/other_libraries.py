"""What does a tensor answer where PyTorch is meant? An attribute of its tensors, a function of
PyTorch: an error that says what to type. (NumPy's functions work: `lang/numpy_names.py`.)
"""

from __future__ import annotations

from typing import Any

from ..core.errors import UsageError, fail
from ..core.peers import SPACES, no_name
from .tensor import Tensor, method

SPACES["x"] = vars(Tensor).keys()  # those to come too


@method("__getattr__")
def _no_attribute(x: Tensor, name: str) -> Any:
    if hasattr(type(x), name):  # a property that failed: its own error
        return object.__getattribute__(x, name)
    shown = [("tensor", x.__dict__["type"])] if "type" in x.__dict__ else []
    raise no_name(f"{type(x).__name__!r} object", "Tensor", name, SPACES["x"], shown)


def _for_torch(kind: type, f: Any, types: Any, args: tuple[Any, ...] = (), how: Any = None) -> Any:
    given = [a for a in (*args, *(how or {}).values()) if isinstance(a, Tensor)]
    if not given:
        return NotImplemented
    raise fail(
        UsageError,
        f"torch.{getattr(f, '__name__', f)} does not compute with a Tensor of Tessera",
        [("tensor", given[0].type)],
        fix="use a function of ts or nn, or the value, without a gradient: torch.as_tensor(x)",
    )


Tensor.__torch_function__ = classmethod(_for_torch)  # type: ignore[attr-defined]
