"""Names that a guide uses but does not define, found in its code.

`GIVEN` lists the values that the tests supply; no other name is supplied.
"""

from __future__ import annotations

import ast
import builtins
import dis
from collections.abc import Iterable, Iterator
from types import CodeType

from tests.guide.runner import Snippet

GIVEN: dict[int, dict[str, str]] = {
    1: {
        "graph": "the module, which the text does not import",
        "schedule": "the module, which the text does not import",
        "W_local": "a matrix split over the axis dp",
        "X_local": "a matrix split over the axis dp, along the dim that is summed",
        "transformer": "the reader's model: four blocks as stages of a pipeline",
    },
    2: {
        "out": "the logits of a product that is split over dp",
        "labels": "a label for each row",
        "H": "a width",
        "X": "a matrix split over dp",
        **{f"b{i}": "a stage of the model" for i in range(4)},
        "x": "rows for experts, split over both axes",
        "experts": "the router and two matrices for each expert",
        "model": "a GPT",
        "optimizer": "an AdamW and its state: ours keeps none, so state_dict takes it",
        "train_epoch": "a loop of elastic.steps over dp, in which a device is lost",
    },
    3: {"STAGES": "a mesh that has the axis pp, which the text's own lacks"},
    4: {
        "SMALL": "the sizes of a model that a test can train, and where its data lie",
        "transformer_model": "tessera.train.recipe",
        "create_dataloader": "tessera.data",
        "create_distributed_dataloader": "tessera.data",
        "save_checkpoint": "tessera.train.saving",
        **dict.fromkeys(
            (
                "adam_optimizer", "adam_update_single_param", "apply_optimizer_update",
                "clip_gradients", "compute_gradient_norm", "initialize_model_weights",
                "initialize_optimizer_state", "optimizer_step",
            ),
            "tessera.train.recipe",
        ),
    },
    5: {
        "transformers": "the library, which the text does not import",
        "assert_with_pcc": "asserts how much two arrays correlate, and at least 0.99",
        "activations": "rows for the MLP of section 7",
        "hybrid": "the MLP of section 7, with weights on each part of the mesh",
        "results": "a dict for the results of the parts",
    },
}  # fmt: skip


def names_of(code: CodeType) -> tuple[set[str], set[str]]:
    """Returns (the names that the code reads outside of functions, those that it assigns there)."""
    ops = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    loads = {str(v) for op, v in ops if op in ("LOAD_NAME", "LOAD_GLOBAL")}
    stores = {str(v) for op, v in ops if op in ("STORE_NAME", "STORE_GLOBAL")}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, also = names_of(inner)
            loads |= more
            stores |= also
    return loads, stores


def free_names(found: Iterable[Snippet]) -> Iterator[tuple[Snippet, list[str]]]:
    """Yields each snippet with the names that no snippet of the guide defines."""
    every = [(s, *names_of(compile(s.code, s.name, "exec"))) for s in found]
    known = set(dir(builtins)).union(
        {"__name__", "__annotations__"}, *(stores for _, _, stores in every)
    )
    for snippet, loads, _ in every:
        yield snippet, sorted(loads - known)


def imported(found: Iterable[Snippet]) -> set[str]:
    """The names that the guide imports."""
    nodes = [n for s in found for n in ast.walk(ast.parse(s.code))]
    return {
        a.asname or a.name
        for n in nodes
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for a in n.names
    }
