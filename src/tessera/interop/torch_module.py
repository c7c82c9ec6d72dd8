"""`from_torch`: a PyTorch module as a module of ours, which plays its exported program."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from ..core.checks import instance, shown
from ..core.declared import Flag
from ..core.errors import ShapeError, UnknownNameError, UsageError
from ..lang.foreign.program import play
from ..lang.record.operands import as_tensor
from ..lang.record.parameter import Parameter
from ..lang.record.static_arguments import Same
from ..lang.value.tensor import Tensor
from ..nn.module import Module, Unmatched
from .aten import ATEN
from .torch_export import Argument, Exported, export, from_torch_tensor, torch_library

_PLAIN = (bool, int, float, str, type(None))


def from_torch(
    module: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> TorchModule:
    """Returns the `torch.nn.Module` `module` as an `nn.Module` that computes the same with tensors
    of ours, at once or in a recorded function, on any mesh and in any layout.

    `args` and `kwargs` are an example call with PyTorch's tensors. The module is exported with
    `torch.export` for their shapes and dtypes; `dynamic_shapes` says which sizes may vary, as
    `torch.export.export` takes it. Other arguments than tensors are part of the program. Parameters
    and buffers have PyTorch's names, as attributes and in `state_dict()`, and are copies.

    The program is of the mode, training or not, that `module` is in. `train()` or `eval()` exports
    the other mode when it is first asked for; until then `module` is kept. Dropout and other random
    numbers follow `ts.seed`. int64 becomes i32, and float64 f32.

    Raises UsageError if torch is not installed, cannot export the module, or an op of it has no
    rule (`ts.interop.rule` adds one); DTypeError for complex numbers, and for whole numbers that do
    not fit i32.
    """
    torch = torch_library()
    instance("from_torch", "the module", module, torch.nn.Module, "give a torch.nn.Module")
    one = not isinstance(args, (tuple, list))
    return TorchModule(Exports(module, (args,) if one else args, kwargs or {}, dynamic_shapes))


class Outputs(dict[str, Any]):
    """Results by name, as `out["logits"]` and `out.logits`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        text = f"the results have no {name!r}"
        if name.startswith("_"):
            raise AttributeError(text)
        raise UnknownNameError(text, fix=f"they have {', '.join(self)}")


class Exports:
    """The programs of a PyTorch module by mode, True for training. The module itself is kept until
    there are both."""

    def __init__(
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
    ) -> None:
        self.name = type(module).__name__
        to_json = getattr(getattr(module, "config", None), "to_json_string", str)
        self.config: str = to_json()  # of a model of transformers; "" for others
        self.module, self.training = module, bool(module.training)
        self.signature = inspect.signature(module.forward)
        self.example: tuple[list[Any], dict[str, Any]] | None = self.named(args, kwargs)
        placed, by_name = self.example
        if isinstance(dynamic_shapes, (tuple, list)) and not placed:
            dynamic_shapes = dict(zip(by_name, dynamic_shapes, strict=True))
        self.dynamic_shapes = dynamic_shapes
        self.programs: dict[bool, Exported] = {}
        self.need(self.training)

    def need(self, training: bool) -> None:
        """Exports the mode `training`, unless it is there."""
        if training in self.programs:
            return
        assert self.example is not None  # as long as a mode is missing
        modes = [(m, m.training) for m in self.module.modules()]
        if training != self.training:
            self.module.train(training)
        try:
            found = export(self.module, *self.example, self.dynamic_shapes, ATEN)
        finally:
            for module, mode in modes:
                module.training = mode
        self.programs[training] = found
        if len(self.programs) == 2:
            self.module = self.example = None

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy of a module has the same programs

    # -- arguments --------------------------------------------------------------------------------
    def named(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call of `forward`, by name as far as possible; those that are left at
        their defaults are left out. Raises UsageError if they do not fit."""
        try:
            found = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise UsageError(
                f"{self.name}: {error}",
                fix=f"its forward takes {self.signature}",
            ) from None
        parameters = self.signature.parameters
        kinds = inspect.Parameter
        spread = any(p.kind is kinds.VAR_POSITIONAL for p in parameters.values())
        placed: list[Any] = []
        by_name: dict[str, Any] = {}
        for name, value in found.items():
            p = parameters[name]
            if p.kind is kinds.VAR_POSITIONAL:
                placed += value
            elif p.kind is kinds.VAR_KEYWORD:
                by_name |= value
            elif p.kind is kinds.POSITIONAL_ONLY or (
                spread and p.kind is kinds.POSITIONAL_OR_KEYWORD
            ):
                placed.append(value)
            elif not (
                type(value) in _PLAIN and type(value) is type(p.default) and value == p.default
            ):
                by_name[name] = value
        return placed, by_name

    def leaves(
        self, program: Exported, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """The tensors and numbers of a call, in the order of the program's arguments. Raises
        UsageError if the example call had others."""
        from torch.utils import _pytree as pytree

        placed, by_name = self.named(args, kwargs)
        names = program.in_spec.child(1).context
        unlike = sorted({*names} ^ {*by_name})
        if unlike:
            raise UsageError(
                f"{self.name}: the program was exported {_with(names)}, it cannot take"
                f" {_with([*by_name])}",
                fix=f"give {unlike[0]!r} as in the example call, or export it with the arguments"
                " that it shall have",
            )
        ordered = {n: by_name[n] for n in names}
        leaves, spec = pytree.tree_flatten((tuple(placed), ordered))
        if spec != program.in_spec:
            raise UsageError(
                f"{self.name}: the arguments have another structure than in the example call",
                rows=[
                    (n, _tree_text(s)) for n, s in (("given", spec), ("example", program.in_spec))
                ],
                fix="give tuples, lists and dicts as in the example call",
            )
        return self.fitted(program, leaves)

    def fitted(self, program: Exported, leaves: Sequence[Any]) -> list[Any]:
        sizes: dict[str, tuple[int, str]] = {}
        return [
            self.fit(program, want, x, sizes)
            for want, x in zip(program.arguments, leaves, strict=True)
        ]

    def fit(
        self, program: Exported, want: Argument, x: Any, sizes: dict[str, tuple[int, str]]
    ) -> Any:
        """`x` as the argument `want`. `sizes` collects the sizes that may vary, by their names."""
        if want.shape is None:
            if want.dtype is None and (type(x) is not type(want.value) or x != want.value):
                raise UsageError(
                    f"{self.name}: {want.name} is {shown(x)}, the program was exported with"
                    f" {shown(want.value)}",
                    fix="values of other arguments than tensors are part of the program: export"
                    " another one",
                )
            return x
        torch = torch_library()
        t = from_torch_tensor(x) if isinstance(x, torch.Tensor) else as_tensor(x)
        t = t.to(want.dtype) if t.dtype.is_int and want.dtype and want.dtype.is_int else t
        if t.dtype is not want.dtype:
            raise UsageError(
                f"{self.name}: {want.name} is of {t.dtype}, the program was exported with"
                f" {want.dtype}",
                x=t.type,
                fix=f"cast it: {want.name}.to({want.dtype})",
            )
        wrong = None if t.ndim == len(want.shape) else "the rank"
        for d, (n, size) in enumerate(zip(t.shape, want.shape, strict=False)):
            if wrong is None and isinstance(size, int):
                wrong = f"dim {d}" if n != size else None
            elif wrong is None and isinstance(size, str):
                least, most = program.ranges.get(size, (0, np.inf))
                first, where = sizes.setdefault(size, (n, f"dim {d} of {want.name}"))
                if n != first:
                    wrong = f"dim {d}, which is {where} with {first} elements,"
                elif size.isidentifier() and not least <= n <= most:
                    wrong = f"dim {d}, from {least:.0f} to {most:.0f},"
        if wrong:
            raise ShapeError(
                f"{self.name}: {wrong} of {want.name} is not as in the example call",
                rows=[("given", t.type), ("example", f"{want.dtype}{list(want.shape)}")],
                fix="export the module with this shape, or with dynamic_shapes= for sizes that"
                " vary",
            )
        return t


def _tree_text(spec: Any) -> str:
    """A structure of PyTorch's trees on one line, with * for a tensor or a number."""
    if spec.is_leaf():
        return "*"
    parts = [_tree_text(child) for child in spec.children()]
    if isinstance(spec.context, list) and len(spec.context) == len(parts):
        return f"{{{', '.join(f'{k}: {v}' for k, v in zip(spec.context, parts, strict=True))}}}"
    return f"[{', '.join(parts)}]" if spec.type is list else f"({', '.join(parts)})"


def _with(names: Sequence[str]) -> str:
    return f"with {', '.join(names)}" if names else "without arguments by name"


# -- modules --------------------------------------------------------------------------------------
class Part(Module):
    """A module inside a PyTorch model: its parameters, buffers and parts under PyTorch's names."""

    _unsaved: frozenset[str] = frozenset()  # buffers that state_dict() leaves out
    only_linear = True  # of its matrices those of linear layers can have adapters

    def __getitem__(self, key: int | str) -> Any:
        return getattr(self, str(key))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "from_torch: a part of a PyTorch model is not called on its own",
            fix="the program is that of the whole: export the part by itself, ts.from_torch(part,"
            " args)",
        )

    def state_dict(self) -> dict[str, Tensor]:
        """A dict of all parameters and persistent buffers by PyTorch's names; a tied one comes
        under each of its names. The values do not change in later steps."""
        values: dict[int, Tensor] = {}
        return {n: values.setdefault(id(t), t.now()) for n, t in self.saved(False)}

    def load_state_dict(self, values: Mapping[str, Any], strict: Flag = True) -> Unmatched:
        """Writes all values of a `state_dict()`, of this model or of PyTorch's.

        Raises the errors of `nn.Module.load_state_dict`; then nothing is written."""
        torch = torch_library()
        new = {
            name: from_torch_tensor(v) if isinstance(v, torch.Tensor) else v
            for name, v in values.items()
        }
        return self._load("load_state_dict", new, {n for n, _ in self.saved(True)}, strict)

    def saved(self, once: bool = True) -> list[tuple[str, Tensor]]:
        """The names and tensors of `state_dict()`; with `once` each tensor by its first name."""
        unsaved = {
            f"{path}.{name}" if path else name
            for path, part in self.named_modules()
            for name in getattr(part, "_unsaved", ())
        }
        every = (
            *self.named_parameters(remove_duplicate=once),
            *self.named_buffers(remove_duplicate=once),
        )
        return [(str(name), t) for name, t in every if name not in unsaved]


class TorchModule(Part):
    """A PyTorch module that `ts.from_torch` has made a module of ours."""

    def __init__(self, exports: Exports) -> None:
        self._exports = Same(exports)  # in the key of a recording by its identity
        self.scope_name = exports.name.lower()
        _fill(self, exports.module)
        Module.train(self, exports.training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what PyTorch's `forward` returns for these arguments, in the same structure;
        dataclasses come as dicts with attributes. In training it updates the buffers that `forward`
        updates, such as running statistics."""
        exports = self.exports
        program = exports.programs[self.training]
        given = iter(exports.leaves(program, args, kwargs))
        inputs = []
        for source in program.sources:
            if source.kind == "state":
                inputs.append(part_at(self, source.name))
            else:
                inputs.append(source.value if source.kind == "constant" else next(given))
        results = play(program.program, inputs, ATEN, exports.name)
        for name, value in zip(program.writes, results, strict=False):
            path, _, last = name.rpartition(".")
            setattr(part_at(self, path), last, value)
        return _built(program.out_spec, iter(results[len(program.writes) :]))

    @property
    def exports(self) -> Exports:
        """The programs of the module."""
        exports = self._exports.x
        assert isinstance(exports, Exports)
        return exports

    def train(self, mode: Flag = True) -> Self:
        """Sets the mode of the whole model; the first time the PyTorch module is exported in it."""
        self.exports.need(mode)
        return super().train(mode)


def part_at(module: Any, name: str) -> Any:
    """The attribute of `module` at the path `name`; itself for ""."""
    for part in name.split(".") if name else ():
        module = getattr(module, part)
    return module


def _fill(root: Part, module: Any) -> None:
    """Gives `root` the parameters and buffers of the PyTorch module, in parts of its names."""
    torch = torch_library()
    made: dict[int, Tensor] = {}
    linear, embeddings = (
        {id(m.weight) for m in module.modules() if isinstance(m, kind)}
        for kind in (torch.nn.Linear, torch.nn.Embedding)
    )

    def keep(name: str, t: Any, trained: bool) -> Part:
        *path, last = name.split(".")
        part = root
        for key in path:
            if not isinstance(vars(part).get(key), Part):
                _free(part, key, name)
                setattr(part, key, Part())
            part = getattr(part, key)
        _free(part, last, name)
        if id(t) not in made:
            value = from_torch_tensor(t)
            is_weight = trained and value.dtype.is_float
            made[id(t)] = (
                Parameter(value, requires_grad=bool(t.requires_grad)) if is_weight else value
            )
            made[id(t)].out_in = id(t) in linear - embeddings
        setattr(part, last, made[id(t)])
        return part

    for name, t in module.named_parameters(remove_duplicate=False):
        keep(name, t, True)
    for path, inner in module.named_modules(remove_duplicate=False):
        for name, t in inner.named_buffers(recurse=False):
            part = keep(f"{path}.{name}" if path else name, t, False)
            if name in inner._non_persistent_buffers_set:
                part._unsaved = part._unsaved | {name}


def _free(part: Part, name: str, full: str) -> None:
    if hasattr(type(part), name):
        raise UsageError(
            f"from_torch: {full!r} has a name that modules use here",
            fix=f"rename {name!r} in the PyTorch module",
        )


# -- results --------------------------------------------------------------------------------------
def _built(spec: Any, leaves: Iterator[Any]) -> Any:
    """The results in the structure `spec` of PyTorch's trees."""
    if spec.is_leaf():
        return next(leaves)
    parts = [_built(child, leaves) for child in spec.children()]
    kind, context = spec.type, spec.context
    if kind in (list, tuple):
        return kind(parts)
    if isinstance(context, type) and issubclass(context, tuple):
        return context(*parts)
    if isinstance(context, (list, tuple)) and len(context) == len(parts):
        names = dict(zip(context, parts, strict=True))
        return names if kind is dict else Outputs(names)
    return tuple(parts)


def to_torch(values: Any) -> Any:
    """Returns a tensor, or a dict of them such as `state_dict()`, as tensors of PyTorch on the CPU.

    They are copies, and i32 stays int32: `torch_module.load_state_dict(ts.interop.to_torch(
    model.state_dict()))` loads them into tensors of any dtype. Raises UsageError if torch is not
    installed.
    """
    torch = torch_library()
    if isinstance(values, Mapping):
        return {name: to_torch(value) for name, value in values.items()}
    x = as_tensor(values)
    host = np.array(x.numpy())
    if x.dtype.is_float and x.dtype.name != "f32":
        bits = torch.from_numpy(host.view(np.int16 if x.dtype.bytes == 2 else np.uint8))
        return bits.view(getattr(torch, x.dtype.numpy.name))
    return torch.from_numpy(host)
