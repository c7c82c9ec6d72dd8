"""The protocol of the engine, which compiles and runs programs for the language.

The language sits below the engine and must not import it. The package registers a loader at import
(`set_engine`); the engine is loaded at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from ...core.errors import BackendError
from ...core.layout import TensorType
from ...core.mesh import Mesh
from ...ir.graph.node import Graph
from ...ir.schedule.schedule import Schedule

Data = Any  # a device array of the engine
Parts = Sequence[tuple[tuple[slice, ...], Any]]
"""Parts of a tensor, each with the array of the host into which its values go."""


class Program(Protocol):
    """A compiled schedule: device arrays in, device arrays out."""

    schedule: Schedule

    types: tuple[TensorType, ...]

    wants: tuple[TensorType, ...]

    def start(self) -> None:
        """Starts the devices of the program unless they run already. Raises BackendError if there
        are too few."""

    def __call__(
        self,
        args: Sequence[Data],
        arg_types: Sequence[TensorType] | None,
        done: list[list[Data]] | None = None,
    ) -> list[Data]:
        """Runs the program and returns the results' arrays. `arg_types` are the arguments' types,
        which may lack the mesh (None: they are known to be `wants`). The results are added to
        `done` too, so that they survive an asynchronous exception at the end of the run."""


class Lowered(Protocol):
    """A program that the engine has lowered."""

    def text(self) -> str:
        """Its text in StableHLO."""

    def compiled(self) -> tuple[str, dict[str, float], dict[str, int]]:
        """(text in HLO, cost, bytes as in `program_bytes`) once it is compiled."""


class HostCopy(Protocol):
    """A copy of an array in host memory; a call brings it back to the devices."""

    bytes: int

    def wait(self) -> None:
        """Returns when the copy is made."""

    def __call__(self, of: object = None) -> Data: ...


class Engine(Protocol):
    """Places arrays, compiles graphs, reads results."""

    def start(self, mesh: Mesh | None) -> None: ...
    def compile(self, graph: Graph, donate: Sequence[int] = ()) -> Program: ...
    def step_by_step(self, schedule: Schedule) -> Program: ...
    def place(self, value: Any, type: TensorType) -> Data: ...
    def place_blocks(self, fill: Callable[[Parts], None], type: TensorType) -> Data: ...
    def local_row_indices(self, type: TensorType) -> Any: ...
    def blocks(self, data: Data, type: TensorType, writer: int) -> list[tuple[Any, Any]]: ...
    def processes(self, mesh: Mesh) -> tuple[int, ...]:
        """The processes whose devices are in `mesh`."""

    def alike(self, caller: str, mesh: Mesh | None, facts: Mapping[str, Any], fix: str) -> None:
        """Raises UsageError, in all processes (of `mesh`), if they differ in `facts`."""

    def barrier(self) -> None: ...
    def gather(self, name: str, value: Any, limit_s: float) -> list[Any]: ...
    def from_first(
        self, name: str, number: int, value: Any, limit_s: float, first: int = 0
    ) -> Any: ...
    def asked(self, name: str, value: Any = None) -> Any: ...
    def last_collectives(self, count: int) -> list[str]: ...
    def fetch(self, data: Data, type: TensorType) -> Any: ...
    def picked(self, data: Data, type: TensorType, at: Sequence[Any]) -> Any:
        """The elements at all combinations of the indices `at` (an array for each dim), on the
        host; None if other processes hold one of them. Nothing communicates."""

    def by_first(self, name: str, run: Callable[[], Any]) -> Any: ...
    def alive(self, data: Data, type: TensorType) -> Data: ...
    def offload(self, data: Data, type: TensorType) -> HostCopy: ...
    def program_bytes(self, program: Program) -> dict[str, int]: ...
    def lowered(self, program: Program) -> Lowered: ...
    def program_cache(self, maps: int | None, size: int | None) -> None: ...
    def delete(self, data: Data) -> None: ...
    def copied(self, data: Data) -> Data: ...
    def wait(self, arrays: Sequence[Data]) -> None:
        """Returns when the arrays are computed."""

    def machine(self, mesh: Mesh | None) -> dict[str, str]:
        """The facts that times of programs on `mesh` depend on: "arch", "backend", "versions"."""

    def memory_bytes(self) -> int:
        """The memory of one device in bytes; 0 if unknown."""

    def open_choices(self, schedule: Schedule) -> dict[str, tuple[str, ...]]:
        """The choices that the engine reads when it compiles `schedule`, with their values."""

    def answers(self, device: int) -> bool: ...
    def clear_caches(self) -> None: ...
    def adopt(self, data: Data, mesh: Mesh | None) -> TensorType: ...
    def is_array(self, value: object) -> bool: ...
    def asks(self, frame: FrameType) -> str: ...
    def no_fused_attention(self, causal: bool, *types: TensorType) -> str:
        """The reason why no library kernel computes attention for q, k and v of these types; "" if
        one does."""

    def opened(self, value: object) -> tuple[tuple[Any, ...], list[Any], Any] | None: ...
    def program_of(self, caller: str, fn: Callable[..., list[Any]], types: Sequence[Any]) -> Any:
        """The JAX function `fn` as a `Program`."""

    def key_data(self, value: Any) -> tuple[Any, str]:
        """(the data of `value`, the name of its implementation) of random keys; else (`value`,
        "")."""

    def key_of(self, data: Any, impl: str) -> Any:
        """Random keys of their data, the inverse of `key_data`."""

    def __hash__(self) -> int: ...


_loaders: list[Callable[[], Engine]] = []
_loaded: list[Engine] = []


def set_engine(loader: Callable[[], Engine]) -> None:
    """Registers a function that loads the engine at its first use."""
    _loaders[:] = [loader]
    _loaded.clear()


def engine() -> Engine:
    """Returns the engine. Raises BackendError if none is registered."""
    if not _loaded:
        if not _loaders:
            raise BackendError("no engine is registered", fix="import tessera")
        _loaded.append(_loaders[0]())
    return _loaded[0]
