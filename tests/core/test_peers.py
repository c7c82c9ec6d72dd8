"""Does each name of another library lead to one that exists here?"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, op, optim
from tessera.core.peer_names import ADVICE, ARGUMENT_ADVICE, ARGUMENTS, INSTEAD
from tests.core.test_lang import Oracle, oracle

__all__ = ["oracle"]
HERE = {"ts": ts, "nn": nn, "optim": optim, "dist": dist, "np": np}
KINDS = {
    "x": ts.Tensor, "model": nn.Module, "optimizer": optim.Optimizer, "mesh": dist.Mesh,
    "self": None,
}  # fmt: skip
TEXTS = {**INSTEAD, **ADVICE, **ARGUMENT_ADVICE}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_offered_exists(name: str) -> None:
    for root, path in re.findall(r"\b(ts|nn|optim|dist|np)\.([\w.]*\w)", TEXTS[name]):
        found: Any = HERE[root]
        for part in path.split("."):
            found = getattr(found, part)
    for root, attribute in re.findall(r"\b(x|model|optimizer|mesh)\.(\w+)\b(?! = )", TEXTS[name]):
        kind = KINDS[root]
        assert attribute in ("dtype", "weight", "name") or hasattr(kind, attribute), attribute


@pytest.mark.parametrize("name", INSTEAD | ADVICE)
def test_a_name_of_the_table_is_not_one_of_ours(name: str) -> None:
    """A row for a name that exists would hide it."""
    same = [m for m in (ts, nn, optim, dist, op) if name in m.__all__]
    assert not same or f".{name}" in TEXTS[name] or name in ("grad", "init")
    assert name not in vars(ts.Tensor) or name in ("T", "astype", "requires_grad")


def test_an_argument_that_is_offered_is_one_of_a_function() -> None:
    here = {
        p
        for m in (ts, nn, optim, dist, op, ts.checkpoint)
        for n in m.__all__
        if inspect.isfunction(f := getattr(m, n)) or inspect.isclass(f)
        if not (inspect.isclass(f) and issubclass(f, Exception))
        for call in (f, *filter(inspect.isfunction, [vars(f).get("__call__")]))
        for p in inspect.signature(call).parameters
    }
    assert {n for names in ARGUMENTS.values() for n in names} <= here


@pytest.mark.parametrize("owner", [ts, nn, optim, dist, op, ts.linalg, ts.graph, ts.debug])
def test_a_public_module_offers_names(owner: Any) -> None:
    with pytest.raises(AttributeError, match=r"fix : write nn\.Linear$") as caught:
        owner.Dense  # noqa: B018
    assert type(caught.value) is ts.UnknownNameError
    with pytest.raises(AttributeError) as plain:
        owner._private  # noqa: B018
    assert type(plain.value) is AttributeError


@pytest.mark.parametrize("name", [n for n in ts.__all__ if inspect.ismodule(getattr(ts, n))])
def test_a_public_module_is_no_function(name: str) -> None:
    module = getattr(ts, name)
    if name in ("op", "schedule"):  # decorators of the guides
        assert callable(module)
        return
    with pytest.raises(ts.UsageError, match=f"^{name}: a module is not a function"):
        module(ts.sum)


def test_functions_are_found_where_pytorch_has_them() -> None:
    from tessera.nn import functional

    assert functional.cross_entropy is nn.cross_entropy and functional.gelu is nn.gelu
    assert not hasattr(functional, "Linear") and not hasattr(functional, "one_hot")


def test_what_asks_for_a_name_gets_an_answer(oracle: Oracle) -> None:
    x, layer, rule = ts.ones((2, 3)), nn.Linear(3, 2), optim.AdamW(0.1)
    for thing in (x, layer, rule, ts, nn):
        assert not hasattr(thing, "nothing_of_this_name") and getattr(thing, "cuda", 3) == 3
    assert pickle.loads(pickle.dumps([ts.sum, op.sum, dist.allreduce, nn.softmax])) == [
        ts.sum, op.sum, dist.all_reduce, nn.softmax,
    ]  # fmt: skip
    assert copy.deepcopy(rule) == rule and copy.deepcopy(x) is x
    assert x.size == 6 and isinstance(x.size, int)


def test_functions_of_torch_do_not_take_tensors(oracle: Oracle) -> None:
    torch = pytest.importorskip("torch")
    x = ts.ones((2, 3))
    with pytest.raises(ts.UsageError, match=r"torch\.exp does not compute with a Tensor"):
        torch.exp(x)
    with pytest.raises(ts.UsageError, match=r"torch\.add does not compute"):
        torch.add(torch.ones(2, 3), other=x)
    assert torch.as_tensor(x).shape == (2, 3)
