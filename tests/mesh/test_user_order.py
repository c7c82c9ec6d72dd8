"""Results of a model in the order of its tokens, for any split of the model.

Ring attention stores a sequence in zig-zag order, but a module never returns that order. The other
strategies are tested too. No module returns attention weights, and a split sequence has no cache
(`test_decode.py`).
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

import tessera as ts
from tessera import dist, nn, pipeline
from tests.cases import LONG

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 32, (8, 16)).astype(np.int32)
LABELS = np.where(RNG.uniform(size=IDS.shape) < 0.2, -100, np.roll(IDS, -1, 1)).astype(np.int32)
LAST = RNG.integers(3, 16, 8).astype(np.int32)  # the last token of each text
THERE = (np.arange(16) <= LAST[:, None]).astype(np.int32)
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("dp=2,cp=2", {"context": "ring"}),
    "ring of four": ("dp=1,cp=4", {"context": "ring"}),
    "ring, tp": ("dp=1,cp=2,tp=2", {"context": "ring", "sequence_parallel": "tp"}),
    "all_to_all": ("dp=2,cp=2", {"context": "all_to_all"}),
    "tp": ("dp=2,tp=2", {}),
    "tp, sequence": ("dp=2,tp=2", {"sequence_parallel": "tp"}),
    "pp": ("dp=2,pp=2", {}),
    "ring, pp": ("dp=1,pp=2,cp=2", {"context": "ring"}),
    "all_to_all, pp": ("dp=1,pp=2,cp=2", {"context": "all_to_all"}),
}


def placed(where: str, options: dict[str, Any], kind: type[nn.GPT] = nn.GPT) -> Any:
    ts.seed(3)
    mesh, plan = dist.Mesh.parse(where), dist.strategy("data_parallel")
    plan = plan + dist.strategy("tensor_parallel") if "tp" in mesh else plan
    config = nn.GPTConfig(
        vocab=32, seq=16, d=16, layers=2, heads=4, positions="rotary", stacked=False, **options
    )
    model = dist.place(kind(config), plan, mesh)
    return model, *dist.place((IDS, LABELS, LAST, THERE), plan, mesh, kind="batch"), mesh


def by_token(model: Any, ids: Any, labels: Any, last: Any, there: Any) -> dict[str, Any]:
    """Results per token: the model's, and values computed from them."""
    hidden = model.features(ids)
    logits = model(ids)
    logprobs = nn.log_softmax(logits)
    ends = ts.gather(hidden, last.reshape(-1, 1, 1), 1)
    return {
        "features": hidden,
        "features of padded texts": model.features(ids, there) * there.reshape(*ids.shape, 1),
        "the last token": hidden[:, -1],
        "where each text ends": ends,
        "logits": logits,
        "logprobs": ts.gather(logprobs, ids.reshape(*ids.shape, 1), -1),
        "losses": nn.nll_loss(logprobs, labels, reduction="none"),
    }


def losses(model: Any, ids: Any, labels: Any) -> Any:
    """The sum of the model's loss, the loss of its features, and a last-token classifier's loss."""
    hidden = model.features(ids)
    classified = nn.cross_entropy(hidden[:, -1], ids[:, 0] % 16)
    return model.loss(ids, labels) + 2 * model.loss_of(hidden, labels) + classified


def by_prompt(model: Any, ids: Any, labels: Any) -> dict[str, Any]:
    logits, kept = model.prefill(ids, labels, 16)
    return {"the last logits": logits, **kept}


def all_of(where: str, options: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    model, ids, labels, last, there, mesh = placed(where, options)

    def staged(body: Any) -> Any:
        return pipeline.run(("pp",), "1F1B", 4, mesh=mesh)(body) if "pp" in mesh else body

    def run(body: Any, *given: Any) -> Any:
        return ts.jit(lambda model, *given: body(model, *given))(model, *given)

    mean = staged(losses)

    def trained(model: Any, ids: Any, labels: Any) -> Any:
        loss = mean(model, ids, labels)
        return {"loss": loss, "gradient": ts.grad(loss, model.parameters()["embed.weight"])}

    found = run(staged(by_token), ids, labels, last, there) | run(trained, ids, labels)
    if "context" not in options and "pp" not in mesh:
        found |= run(by_prompt, ids, last)
    return {name: t.numpy() for name, t in found.items()}


@cache
def alone() -> dict[str, np.ndarray[Any, Any]]:
    return all_of("dp=1", {})


FEW = ("all_to_all", "tp", "ring, pp")


@pytest.mark.parametrize("where", [pytest.param(w, marks=[LONG] * (w not in FEW)) for w in PLACES])
def test_results_come_in_the_order_of_the_tokens(where: str) -> None:
    want, got = alone(), all_of(*PLACES[where])
    kept = {"the last logits", "k", "v"}  # split sequences, and layers in stages, have no cache
    assert want.keys() - got.keys() <= kept and got.keys() <= want.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], rtol=0, atol=1e-5, err_msg=name)


def test_the_loss_sends_nothing_for_the_order() -> None:
    model, ids, labels, *_ = placed(*PLACES["ring"])
    sent = {}
    for name, body in (
        ("features", lambda model, ids, labels: model.features(ids)),
        ("loss", lambda model, ids, labels: model.loss(ids, labels)),
        ("loss of features", lambda model, ids, labels: model.loss_of(model.features(ids), labels)),
    ):
        f = ts.jit(body)
        f(model, ids, labels)
        sent[name] = Counter(n.op for n, _ in f.graph.collectives())
    rounds = {"permute": 2 * 2}  # keys and values of two layers are sent to the other device
    assert sent["features"] == {**rounds, "all_gather": 1}
    assert sent["loss"] == {**rounds, "all_reduce": sent["loss"]["all_reduce"]}
    assert sent["loss of features"] == {**sent["loss"], "all_gather": 1}


class Doubled(nn.GPT):
    def features(self, ids: Any) -> Any:  # type: ignore[override]
        return super().features(ids) * 2.0


def test_features_of_a_class_of_ones_own_are_what_its_loss_reads() -> None:
    found = []
    for where, options in (("dp=1", {}), PLACES["ring"]):
        model, ids, labels, *_ = placed(where, options, Doubled)
        found.append(ts.jit(lambda model, ids, labels: model.loss(ids, labels))(model, ids, labels))
    assert found[0].item() == pytest.approx(found[1].item(), abs=1e-5)
    model, ids, labels, *_ = placed("dp=1", {})
    assert abs(found[0].item() - model.loss(ids, labels).item()) > 1e-3
