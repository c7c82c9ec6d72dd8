"""What does `with ttnn.distribute(...)` change? The mapper of `from_torch`, or the composer of
`to_torch`, where they are not given one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from .faults import wrong
from .mapping import MeshToTensor, TensorToMesh

_mapper: ContextVar[TensorToMesh | None] = ContextVar("ttnn_mapper", default=None)
_composer: ContextVar[MeshToTensor | None] = ContextVar("ttnn_composer", default=None)
mapper_now, composer_now = _mapper.get, _composer.get


@contextlib.contextmanager
def distribute(default: TensorToMesh | MeshToTensor) -> Iterator[None]:
    """Within the block, `from_torch` distributes by this mapper, or `to_torch` joins by this
    composer. Raises TTNNError if it is neither."""
    if isinstance(default, TensorToMesh):
        token = _mapper.set(default)
        try:
            yield
        finally:
            _mapper.reset(token)
    elif isinstance(default, MeshToTensor):
        other = _composer.set(default)
        try:
            yield
        finally:
            _composer.reset(other)
    else:
        raise wrong(
            f"distribute: {default!r} is neither a mapper nor a composer",
            fix="ttnn.ShardTensorToMesh(device, dim=0), ttnn.ConcatMeshToTensor(device, dim=0)",
        )


__all__ = [
    "distribute",
]  # fmt: skip
