"""Names of weights with a hint for users of PyTorch, who expect weights from `model.parameters()`.

`parameters()` is a dict, as in JAX, so a loop over it gives names. Each is a string that, asked for
an attribute of a tensor, raises an error with the way to the tensor.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..core.errors import UnknownNameError, UsageError

_FIX = "parameters() is a dict: for p in model.parameters().values()"


class WeightName(str):
    """The name of a weight in `Module.parameters()`."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        text = f"{str(self)!r} is the name of a weight, it has no {name!r}"
        if name.startswith("_"):  # a question of Python or of a library, no user's
            raise AttributeError(text)
        raise UnknownNameError(text, fix=_FIX)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self.__getattr__(name)

    def _no_number(self, other: object, *more: object) -> NoReturn:
        raise UsageError(
            f"{str(self)!r} is the name of a weight, it is not computed with", fix=_FIX
        )

    __pow__ = __mul__ = __rmul__ = _no_number

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)
