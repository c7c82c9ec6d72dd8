"""Hugging Face folders: the same logits on every mesh, and an unchanged copy when saved."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tessera as ts
from tessera import dist, nn, pipeline
from tessera.checkpoint import load_hf, save_hf
from tessera.interop import hf_files
from tessera.interop.hf_models import ARCHITECTURES
from tessera.train.generate import generate
from tests.cases import LONG, short

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

IDS = np.random.default_rng(0).integers(0, 128, (4, 24)).astype(np.int32)
TP, DP = dist.strategy("tensor_parallel"), dist.strategy("data_parallel")
ZERO = dist.strategy("zero_redundancy_optimizer", stage=3)
TP4 = dist.Mesh(("tp",), shape={"tp": 4})
BOTH = dist.Mesh(("dp", "tp"), shape={"dp": 2, "tp": 2})
MESHES = {"one": (None, None), "tp4": (TP4, TP), "dp2tp2": (BOTH, DP + TP)}
# Also on four devices: heads, groups and biases in every possible split.
FEW = ("gpt2-untied", "llama-biased", "qwen2", "falcon-one-norm", "gemma2", "phi")

ENDS = {"vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = {**ENDS, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
FALCON = {
    **ENDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
LLAMA = {**FALCON, "intermediate_size": 96}
GROUPED = {**LLAMA, "num_key_value_heads": 2, "head_dim": 16}
GEMMA = {"sliding_window": 7, "query_pre_attn_scalar": 20}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 96,
                             "activation_function": "relu"}),
    "llama": ("llama", {**LLAMA, "tie_word_embeddings": True}),
    "llama3": ("llama", {**LLAMA, "num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama-biased": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 24,
                               "num_key_value_heads": 1,
                               "rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                                   "rope_theta": 1000.0}}),
    "mistral": ("mistral", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 6}),
    "qwen2": ("qwen2", {**LLAMA, "num_key_value_heads": 2}),
    "falcon": ("falcon", FALCON),
    "falcon-new": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4,
                                   "num_ln_in_parallel_attn": 1, "bias": True}),
    "falcon-alibi": ("falcon", {**FALCON, "hidden_size": 96, "num_attention_heads": 6,
                                "alibi": True, "multi_query": False, "parallel_attn": False,
                                "bias": True}),
    "llama-dynamic": ("llama", {**LLAMA, "max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "qwen3-yarn": ("qwen3", {**GROUPED, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 8}}),
    "qwen3-window": ("qwen3", {**GROUPED, "use_sliding_window": True, "sliding_window": 5,
                               "max_window_layers": 1}),
    "qwen3-experts": ("qwen3_moe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 12}),
    "gemma": ("gemma", {**LLAMA, "num_key_value_heads": 1, "head_dim": 24}),
    "gemma2": ("gemma2", {**GROUPED, **GEMMA, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GROUPED, **GEMMA, "num_hidden_layers": 3,
                               "attn_logit_softcapping": 2.0, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]}),
    "phi": ("phi", {**LLAMA, "num_key_value_heads": 2, "qk_layernorm": True}),
    "phi3": ("phi3", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 9, "pad_token_id": 0,
                      "original_max_position_embeddings": 32}),
    "phi3-long": ("phi3", {**LLAMA, "pad_token_id": 0, "original_max_position_embeddings": 8,
                           "rope_parameters": {
                               "rope_type": "longrope", "rope_theta": 10000.0,
                               "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5, 2.0, 2.5],
                               "long_factor": [1.0, 2.0, 3.0, 4.0]}}),
    "gpt-neox": ("gpt_neox", {**LLAMA}),
    "gpt-neox-sequential": ("gpt_neox", {**LLAMA, "use_parallel_residual": False,
                                         "attention_bias": False, "rotary_pct": 0.5}),
}  # fmt: skip
# One of each architecture, unless two differ in the names of weights alone.
DEFAULT = (
    "gpt2", "llama3", "mistral", "gemma3", "qwen3-window", "qwen3-experts", "phi", "phi3", "falcon",
    "gpt-neox-sequential",
)  # fmt: skip


def logits(model: nn.GPT, ids: ts.Tensor) -> ts.Tensor:
    return ts.jit(lambda model, ids: model(ids))(model, ids)  # type: ignore[no-any-return]


def theirs(model: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(model(torch.tensor(IDS.astype(np.int64))).logits.float())


def made(kind: str, options: dict[str, Any]) -> Any:
    """A random model. Norms and biases are drawn too, since ones and zeros would hide errors."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.1)
            if name.endswith("bias"):
                p.normal_(0.0, 0.1)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Returns a function that gives the folder of one of MODELS, and its logits by transformers."""
    root = tmp_path_factory.mktemp("hf")
    done: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in done:
            model = made(*MODELS[name])
            model.save_pretrained(root / name)
            done[name] = root / name, theirs(model)
        return done[name]

    return get


def on(mesh: dist.Mesh | None, plan: Any) -> ts.Tensor:
    ids = ts.tensor(IDS, mesh=mesh)
    return ids if plan is None else dist.place([ids], plan, mesh, kind="batch")[0]


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", short(MODELS, *DEFAULT))
def test_logits_are_those_of_transformers_on_every_mesh_and_it_goes_back(
    name: str, everything: bool, folder: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    path, want = folder(name)
    assert want.std() > 0.5  # large enough that wrong logits would not be close
    chosen = {"dp2tp2"} | ({"one"} if everything or name in DEFAULT[::4] else set())
    for mesh, plan in (MESHES[m] for m in MESHES if m in chosen or name in FEW):
        model = load_hf(path, mesh, plan)
        np.testing.assert_allclose(logits(model, on(mesh, plan)).numpy(), want, rtol=0, atol=1e-4)
    save_hf(model, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_array_equal(theirs(again), want)
    before, after = tensors(path), tensors(tmp_path / "out")
    assert set(before) == set(after)
    for key, value in before.items():
        assert value.tobytes() == after[key].tobytes()
    first, second = (json.loads((p / "config.json").read_text()) for p in (path, tmp_path / "out"))
    assert first == second


def test_heads_are_split_whole_and_few_of_them_are_on_every_device(
    folder: Callable[[str], tuple[Path, Any]],
) -> None:
    layouts = {k: t.layout for k, t in load_hf(folder("qwen2")[0], TP4, TP).parameters().items()}
    block = "blocks.block."
    assert layouts[f"{block}attention.q"] == "[2, 64, 4@tp, 16]"
    assert layouts[f"{block}attention.q_bias"] == "[2, 1, 4@tp, 16]"
    assert layouts[f"{block}attention.kv"] == "[2, 64, 2, 2, 16]"  # two heads, four devices
    assert layouts[f"{block}attention.kv_bias"] == "[2, 2, 2, 16]"
    assert layouts[f"{block}mlp.down"] == "[2, 96@tp, 64]"
    two = load_hf(folder("qwen2")[0], BOTH, TP).parameters()
    assert two[f"{block}attention.kv"].layout == "[2, 64, 2, 2@tp, 16]"
    biased = load_hf(folder("gpt2")[0], TP4, TP).parameters()
    assert biased[f"{block}attention.qkv_bias"].layout == "[2, 3, 4@tp, 16]"
    assert biased[f"{block}mlp.up_bias"].layout == "[2, 256@tp]"
    assert biased[f"{block}mlp.down_bias"].layout == "[2, 64]"


@pytest.mark.parametrize("name", ["falcon-new", "llama-biased"])
def test_few_heads_of_keys_cost_no_more_messages(
    name: str, folder: Callable[[str], tuple[Path, Any]]
) -> None:
    """Megatron's count: one all_reduce per sublayer, or one for both parallel sublayers."""
    model = load_hf(folder(name)[0], TP4, TP)
    graph = ts.graph.simplify(ts.graph.trace(lambda m, i: m.features(i), model, on(TP4, TP)))
    kinds = [n.op for n, _ in graph.collectives()]
    assert kinds == ["all_reduce"] * (1 + (2 if name == "falcon-new" else 4))


def test_zero_splits_what_is_loaded(folder: Callable[[str], tuple[Path, Any]]) -> None:
    path, want = folder("llama3")
    plan = DP + TP + ZERO
    model = load_hf(path, BOTH, plan)
    assert set(model.parameters()["blocks.block.mlp.up"].type.split_axes) == {"dp", "tp"}
    np.testing.assert_allclose(logits(model, on(BOTH, plan)).numpy(), want, rtol=0, atol=1e-4)


def test_only_the_blocks_of_devices_are_read(
    folder: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    most: dict[tuple[int, ...], int] = {}
    entry = hf_files._entry

    def counted(part: Any) -> hf_files.Entry:
        found = entry(part)

        def get(at: tuple[slice, ...]) -> Any:
            block = found.get(at)
            most[found.shape] = max(most.get(found.shape, 0), block.size)
            return block

        return hf_files.Entry(found.shape, found.stored, get)

    monkeypatch.setattr(hf_files, "_entry", counted)
    load_hf(folder("falcon-new")[0], TP4, TP)
    assert most[128, 64] == 128 * 64 // 4  # the embedding; queries, keys and values are less
    assert most[64, 256] == most[256, 64] == 64 * 256 // 4


def test_shards_and_bf16(tmp_path: Path) -> None:
    model = made(*MODELS["llama3"]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    loaded = load_hf(tmp_path / "in", TP4, TP)
    assert {t.dtype for t in loaded.parameters().values()} == {ts.bf16}
    wide = load_hf(tmp_path / "in", TP4, TP, dtype="f32")
    got = logits(wide, on(TP4, TP)).numpy()
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype="float32")
    np.testing.assert_allclose(got, theirs(same.eval()), rtol=0, atol=1e-4)
    narrow = logits(loaded, on(TP4, TP)).numpy().astype(np.float32)
    assert 0 < np.abs(narrow - got).max() < 0.3
    save_hf(loaded, tmp_path / "out", shard_bytes=50_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert {k: v.tobytes() for k, v in before.items()} == {k: v.tobytes() for k, v in after.items()}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype is torch.bfloat16
    save_hf(wide, tmp_path / "wide")
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"


class Killed(BaseException):
    """A stand-in for SIGKILL: nothing runs after it."""


def test_a_save_that_is_killed_leaves_no_model_and_stands_in_no_ones_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each call that changes the disk. One rename publishes the model, after all else is
    on the disk."""
    model = nn.GPT(nn.GPTConfig(16, 8, 8, 1, 2))
    want = {k: v.numpy().tobytes() for k, v in model.parameters().items()}
    calls, limit, alive = list[str](), 10_000, True

    def point(name: str, call: Any) -> Any:
        def counted(path: Any, *rest: Any) -> Any:
            nonlocal alive
            if len(calls) == limit:
                alive = False
            if not alive:
                raise Killed
            kind = "" if isinstance(path, int) else f" {Path(path).name}"
            calls.append(name + kind)
            return call(path, *rest)

        return counted

    remove = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", point("rename", os.replace))
        patch.setattr(hf_files, "sync", point("sync", hf_files.sync))
        patch.setattr(hf_files, "write_json", point("write", hf_files.write_json))
        patch.setattr(shutil, "rmtree", lambda *a, **k: remove(*a, **k) if alive else None)
        save_hf(model, tmp_path / "whole", shard_bytes=1000)
        order = [*calls]
        whole = order.index("rename config.json")
        files = {p.name for p in (tmp_path / "whole").iterdir()}
        assert len(files) > 4 and {f"sync {f}" for f in files} < {*order[:whole]}
        assert order[whole - 1] == "sync whole" and order[-1] == "sync whole"
        for limit in range(len(order)):
            folder = tmp_path / f"{limit}"
            calls, alive = [], True
            with pytest.raises(Killed):
                save_hf(model, folder, shard_bytes=1000)
            limit, alive = 10_000, True
            if len(calls) > whole:
                found = load_hf(folder).parameters()
                assert {k: found[k].numpy().tobytes() for k in want} == want
                continue
            with pytest.raises(ts.UsageError, match=r"config\.json"):
                load_hf(folder)
            for file in folder.glob("*.safetensors*"):
                with pytest.raises(ts.UsageError, match=r"holds weights without a config\.json"):
                    save_hf(model, folder)
                file.unlink()
            save_hf(model, folder)
            assert {*want} < {*load_hf(folder).parameters()}  # and biases of zero
            assert not [*folder.glob(".part-*")]


def test_an_older_folder_loads_too(
    folder: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Names without the prefix, the mask among the weights, the tied head written out."""
    path, want = folder("gpt2")
    old = {k.removeprefix("transformer."): v for k, v in tensors(path).items()}
    old["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.uint8)
    old["lm_head.weight"] = old["wte.weight"].copy()
    save_file(old, tmp_path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    model = load_hf(tmp_path)
    np.testing.assert_allclose(logits(model, on(None, None)).numpy(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "choices"),
    [
        ("gpt2", {}),
        ("llama", {"norm": "rms", "activation": "swiglu", "positions": "rotary", "kv_heads": 2}),
        ("llama", {"norm": "rms", "activation": "swiglu", "positions": "rotary", "tied": True}),
        ("phi3", {"norm": "rms", "activation": "swiglu", "positions": "rotary",
                  "rope": nn.Rope(partial=0.5)}),
    ],
)  # fmt: skip
def test_a_model_trained_here_goes_out(
    architecture: str, choices: dict[str, Any], tmp_path: Path
) -> None:
    ts.seed(3)
    model = nn.GPT(nn.GPTConfig(vocab=128, seq=32, d=64, layers=2, heads=4, **choices))
    want = logits(model, on(None, None)).numpy()
    save_hf(model, tmp_path / "out")
    out = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert out.config.model_type == architecture
    heads = out.get_output_embeddings().weight, out.get_input_embeddings().weight
    assert (heads[0] is heads[1]) == choices.get("tied", False)
    np.testing.assert_allclose(theirs(out), want, rtol=0, atol=1e-4)
    back = load_hf(tmp_path / "out")
    assert back.config.tied == model.config.tied
    np.testing.assert_allclose(logits(back, on(None, None)).numpy(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("qwen3-window", True),
        pytest.param("llama3", True, marks=LONG),
        pytest.param("phi3-long", False, marks=LONG),
        pytest.param("gemma2", False, marks=LONG),
    ],
)
def test_text_is_continued_as_transformers_does(
    name: str, split: bool, folder: Callable[[str], tuple[Path, Any]]
) -> None:
    path, _ = folder(name)
    mesh, plan = (TP4, TP) if split else (None, None)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path)
    reference.generation_config.eos_token_id = None
    for seed, count in ((0, 5), (1, 11)) if name != "phi3-long" else ((0, 11),):
        prompt = np.random.default_rng(seed).integers(1, 128, count).tolist()
        given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        want = reference.generate(torch.tensor([prompt]), **given)[0].tolist()
        got = generate(load_hf(path, mesh, plan), prompt, 12, temperature=0.0, mesh=mesh)
        assert got == want


# -- options of the architecture ------------------------------------------------------------------
CP4, SP2 = dist.Mesh(("cp",), shape={"cp": 4}), dist.Mesh(("sp",), shape={"sp": 2})
EACH = {f"blocks.layers.{i}." for i in range(2)}


@pytest.mark.parametrize(
    "name", ["gpt2", "llama3", "qwen3-experts", pytest.param("falcon-new", marks=LONG)]
)
def test_options_say_how_a_folder_is_run(
    name: str, folder: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Its logits stay those of transformers, and it is saved unchanged."""
    path, want = folder(name)
    for i, (mesh, plan, config) in enumerate((
        (None, None, {"stacked": False}),
        (BOTH, DP + TP, {"stacked": False, "dropout": 0.5}),
        (CP4, None, {"context": "ring"}),
        (SP2, None, {"context": "all_to_all", "context_axis": "sp"}),
        (None, None, {"attention_implementation": "sequences", "remat": True, "loop": True}),
    )):  # fmt: skip
        model = load_hf(path, mesh, plan, **config).eval()
        for option, value in config.items():
            assert getattr(model.config, option) == value
        got = logits(model, on(mesh, plan)).numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
        apart = {n[: len("blocks.layers.0.")] for n in model.parameters() if "layers." in n}
        assert apart == (EACH if "stacked" in config else set())
        save_hf(model, tmp_path / f"{i}")
        before, after = tensors(path), tensors(tmp_path / f"{i}")
        assert {k: v.tobytes() for k, v in before.items()} == {
            k: v.tobytes() for k, v in after.items()
        }
        first, second = (
            json.loads((p / "config.json").read_text()) for p in (path, tmp_path / f"{i}")
        )
        assert first == second


def test_dropout_of_a_folder_is_applied_when_it_is_asked_for(
    folder: Callable[[str], tuple[Path, Any]],
) -> None:
    path, want = folder("llama3")
    assert json.loads((path / "config.json").read_text())["attention_dropout"] == 0.0
    for p, same in ((None, True), (0.5, False)):
        model = load_hf(path) if p is None else load_hf(path, dropout=p)
        got = logits(model, on(None, None)).numpy()
        assert np.allclose(got, want, rtol=0, atol=1e-4) is same


def test_a_folder_is_loaded_for_a_pipeline(folder: Callable[[str], tuple[Path, Any]]) -> None:
    """Its loss is that of transformers, and each stage holds the weights of its own layers."""
    path, _ = folder("llama3")
    mesh = dist.Mesh(("pp",), shape={"pp": 2})
    model = load_hf(path, stacked=False)
    features = pipeline.run(("pp",), schedule="1F1B", microbatches=4, mesh=mesh)(
        lambda model, ids: model.features(ids)
    )

    @ts.jit
    def loss(model: nn.GPT, ids: ts.Tensor) -> Any:
        value = model.loss_of(features(model, ids[:, :-1]), ids[:, 1:])
        return value, ts.grad(value, model.head)

    peer = transformers.AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor(IDS.astype(np.int64))
    want = peer(ids, labels=ids).loss
    want.backward()
    got, grad = loss(model, IDS)
    np.testing.assert_allclose(got.item(), want.item(), rtol=1e-5)
    np.testing.assert_allclose(
        grad.numpy().T, peer.lm_head.weight.grad.numpy(), rtol=1e-3, atol=1e-6
    )


def test_what_an_option_computes_is_saved_or_refused(
    folder: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """The saved config.json has the option, not the folder's former value."""
    path, _ = folder("mistral")
    wide = load_hf(path, windows=(), seq=64)
    ids = np.random.default_rng(1).integers(0, 128, (1, 48)).astype(np.int32)
    far = logits(wide, ts.tensor(ids)).numpy()
    save_hf(wide, tmp_path / "wide")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").eval()
    with torch.no_grad():
        theirs = again(torch.tensor(ids.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(far, theirs, rtol=0, atol=1e-4)
    capped = load_hf(path, logit_cap=2.0)
    assert np.abs(logits(capped, on(None, None)).numpy()).max() <= 2.0
    with pytest.raises(ts.UsageError, match=r"mistral : logit_cap is 2\.0 here, None there"):
        save_hf(capped, tmp_path / "capped")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"layers": 3}, ["the options change 8 weights", "blocks.block.norm_1.weight : (2, 64) in "
                         "the folder, (3, 64) asked for", "load_hf(folder/config.json, layers=2)"]),
        ({"tied": True}, ["change 1 weights", "head : (64, 128) in the folder, None asked for"]),
        ({"experts": 4}, ["moe.router : None in the folder, (2, 64, 4) asked for"]),
        ({"stack": False}, ["load_hf: an option cannot be 'stack'", "use vocab, seq, d, layers,"]),
        ({"context_axis": "sp"}, ["context_axis='sp' has no effect: the sequence is not split"]),
        ({"dropout": 2}, ["GPTConfig: dropout cannot be 2"]),
    ],
)  # fmt: skip
def test_options_that_a_folder_cannot_have_are_errors(
    config: dict[str, Any], says: list[str], folder: Callable[[str], tuple[Path, Any]]
) -> None:
    with pytest.raises(ts.UsageError) as raised:
        load_hf(folder("llama3")[0], **config)
    text = str(raised.value)
    assert all(part in text for part in says), text


# -- a config without weights ---------------------------------------------------------------------
@pytest.mark.parametrize("name", short(MODELS, "gpt2", "llama3", "gemma3", "qwen3-experts", "phi3"))
def test_a_config_alone_gives_a_model_of_random_weights(name: str, tmp_path: Path) -> None:
    """As a file, a transformers object or a dict: the same model, with transformers' logits."""
    kind, options = MODELS[name]
    theirs_too = transformers.AutoConfig.for_model(kind, **options)
    theirs_too.save_pretrained(tmp_path)
    found = []
    for given in (tmp_path / "config.json", str(tmp_path / "config.json"), theirs_too,
                  theirs_too.to_dict()):  # fmt: skip
        ts.seed(5)
        found.append(nn.load_hf(given))
        assert found[-1].config == found[0].config
    want = logits(found[0], on(None, None)).numpy()
    assert want.std() > 0
    np.testing.assert_array_equal(logits(found[2], on(None, None)).numpy(), want)
    save_hf(found[2], tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(again.config) is type(theirs_too)
    np.testing.assert_allclose(theirs(again), want, rtol=0, atol=1e-4)


def test_a_config_alone_takes_sizes_a_dtype_and_a_strategy() -> None:
    config = transformers.AutoConfig.for_model("qwen2", **{**LLAMA, "num_key_value_heads": 2})
    ts.seed(5)
    whole = nn.load_hf(config, layers=3, hidden=128, stacked=False)
    assert len(whole.blocks.layers) == 3 and {t.dtype for t in whole.parameters().values()} == {
        ts.f32
    }
    ts.seed(5)
    split = nn.load_hf(config, TP4, TP, "bf16", layers=3, hidden=128, stacked=False)
    layer = split.blocks.layers[2]
    assert layer.mlp.up.type.text == "bf16[64, 128@tp]"
    assert layer.attention.kv.layout == "[64, 2, 2, 16]"  # two heads, four devices
    for name, t in whole.parameters().items():
        want = t.to(ts.bf16).to(ts.f32).numpy()
        np.testing.assert_array_equal(split.parameters()[name].to(ts.f32).numpy(), want)
    config.dtype = torch.bfloat16  # transformers' from_config accepts it too
    assert nn.load_hf(config).embed.weight.dtype is ts.bf16
    with TP4:
        assert nn.load_hf(config, strategy=TP).embed.weight.layout == "[128@tp, 64]"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model_type": "t5"}, "model_type 't5' is not known"),
        ({}, "model_type None is not known"),
        (3, "the folder cannot be 3"),
        (transformers.LlamaConfig, "the folder cannot be"),
        ({"model_type": "llama"}, "config.json lacks"),
    ],
)
def test_what_is_no_config_is_an_error(given: Any, says: str) -> None:
    with pytest.raises(ts.UsageError) as raised:
        load_hf(given)
    assert says in str(raised.value)


def test_a_loaded_model_trains(folder: Callable[[str], tuple[Path, Any]]) -> None:
    def loss(model: nn.GPT, ids: ts.Tensor) -> tuple[ts.Tensor, dict[str, ts.Tensor]]:
        value = model.loss(ids, ids)
        return value, ts.grad(value, model.parameters())

    path, _ = folder("qwen2")
    _, alone = ts.jit(loss)(load_hf(path), on(None, None))
    _, split = ts.jit(loss)(load_hf(path, TP4, TP), on(TP4, TP))
    assert set(alone) == set(split)
    for key, g in alone.items():
        assert np.abs(g.numpy()).max() > 0
        np.testing.assert_allclose(split[key].numpy(), g.numpy(), rtol=0, atol=1e-4)


# -- what is wrong with a folder ------------------------------------------------------------------
Spoil = Callable[[Path], object]


PARTS = {"phi", "phi3", "gpt_neox"}


@pytest.mark.parametrize("kind", [k for k in ARCHITECTURES if k != "gpt2"])
def test_parts_of_heads_are_turned_where_transformers_turns_them(kind: str) -> None:
    """The others rotate whole heads whatever their config.json says, so a part is refused."""
    said = {**LLAMA, "partial_rotary_factor": 0.5}
    if kind in PARTS:
        assert ARCHITECTURES[kind].read(said).rope.partial == 0.5
    else:
        with pytest.raises(ts.UsageError, match=r"'partial_rotary_factor' is 0\.5"):
            ARCHITECTURES[kind].read({**said, "norm_topk_prob": True, "moe_intermediate_size": 24})
    name = kind.removesuffix("_text")
    code = Path(transformers.__file__).parent / "models" / name / f"modeling_{name}.py"
    assert ("partial_rotary_factor" in code.read_text()) == (kind in PARTS)


def test_turned_parts_that_an_architecture_lacks_are_not_written(tmp_path: Path) -> None:
    config = nn.GPTConfig(
        vocab=128, seq=32, d=64, layers=1, heads=4, norm="rms", activation="swiglu",
        positions="rotary", rope=nn.Rope(partial=0.5),
    )  # fmt: skip
    with pytest.raises(ts.UsageError, match=r"llama : .*'partial_rotary_factor' is 0\.5"):
        save_hf(nn.GPT(config), tmp_path / "out", "llama")
    assert not (tmp_path / "out").exists()


def config_with(**changed: Any) -> Spoil:
    def spoil(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return spoil


def weights_with(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(path: Path) -> None:
        found = load_file(path / "model.safetensors")
        change(found)
        save_file(found, path / "model.safetensors")

    return spoil


def two_missing_one_extra(found: dict[str, Any]) -> None:
    del found["transformer.wpe.weight"], found["transformer.h.1.ln_1.bias"]
    found["transformer.h.2.ln_1.bias"] = np.zeros(64, np.float32)


def two_of_another_shape(found: dict[str, Any]) -> None:
    found["transformer.wpe.weight"] = np.zeros((16, 64), np.float32)
    found["transformer.h.1.attn.c_attn.weight"] = np.zeros((192, 64), np.float32)


def of_integers(found: dict[str, Any]) -> None:
    found["transformer.ln_f.weight"] = np.ones(64, np.int8)


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda p: (p / "config.json").unlink(), ts.UsageError, ["config.json", "No such file"]),
        (lambda p: (p / "config.json").write_text("{"), ts.UsageError, ["is not JSON: Expecting"]),
        (lambda p: (p / "config.json").write_text("[]"), ts.UsageError, ["holds no JSON object"]),
        (config_with(model_type="t5"), ts.UsageError,
         ["model_type 't5' is not known", "known: gpt2, llama, mistral, qwen2, falcon, qwen3"]),
        (config_with(model_type=None), ts.UsageError, ["model_type None is not known"]),
        (config_with(model_type="deepseek_v3"), ts.UsageError,
         ["model_type 'deepseek_v3' is not known", "latent attention (MLA) is missing"]),
        (config_with(quantization_config={"bits": 4}), ts.UsageError, ["'quantization_config'"]),
        (config_with(add_cross_attention=True), ts.UsageError,
         ["'add_cross_attention' is True, which is not supported"]),
        (config_with(model_type="llama", **LLAMA, partial_rotary_factor=0.5), ts.UsageError,
         ["'partial_rotary_factor' is 0.5, which transformers ignores in a llama"]),
        (lambda p: (p / "model.safetensors").unlink(), ts.UsageError,
         ["holds neither model.safetensors nor model.safetensors.index.json"]),
        (lambda p: (p / "model.safetensors").write_bytes(b"12345678"), ts.UsageError,
         ["model.safetensors' cannot be read"]),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), ts.UsageError,
         ["has no weight_map"]),
        (lambda p: (p / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "gone.safetensors"}}'), ts.UsageError,
         ["gone.safetensors' cannot be read"]),
        (weights_with(two_missing_one_extra), ts.UsageError,
         ["2 names are missing, 1 are too many",
          "transformer.wpe.weight", "transformer.h.1.ln_1.bias",
          "  extra   : transformer.h.2.ln_1.bias"]),
        (weights_with(two_of_another_shape), ts.ShapeError,
         ["2 tensors do not have the shape",
          "transformer.wpe.weight             : (16, 64) in the file, (32, 64) by config.json",
          "transformer.h.1.attn.c_attn.weight : (192, 64) in the file, (64, 192) by config.json"]),
        (weights_with(of_integers), ts.DTypeError, ["transformer.ln_f.weight : I8"]),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_load_says_why(
    spoil: Spoil, error: type[Exception], says: list[str],
    folder: Callable[[str], tuple[Path, Any]], tmp_path: Path,
) -> None:  # fmt: skip
    shutil.copytree(folder("gpt2")[0], tmp_path / "bad")
    spoil(tmp_path / "bad")
    with pytest.raises(error) as raised:
        load_hf(tmp_path / "bad")
    text = str(raised.value)
    assert all(part in text for part in says), text
    assert "  fix" in text


def test_arguments_that_make_no_sense_are_errors(
    folder: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    path, _ = folder("gpt2")
    for bad in (None, 3, "", "a\0b"):
        with pytest.raises(ts.UsageError, match="folder cannot be"):
            load_hf(bad)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ts.MeshError, match="mesh cannot be 3"):
        load_hf(path, 3)  # type: ignore[arg-type]
    with pytest.raises(ts.StrategyError, match="strategy cannot be 'tp'"):
        load_hf(path, TP4, "tp")  # type: ignore[arg-type]
    with pytest.raises(ts.MeshError, match="there is no mesh"):
        load_hf(path, None, TP)
    with pytest.raises(ts.DTypeError, match="'f13' is not known"):
        load_hf(path, dtype="f13")
    model = load_hf(path)
    with pytest.raises(ts.UsageError, match="holds a model already"):
        save_hf(model, path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ts.UsageError, match="cannot be written: "):
        save_hf(model, tmp_path / "file" / "out")


def test_the_current_mesh_is_used(folder: Callable[[str], tuple[Path, Any]]) -> None:
    with TP4:
        assert load_hf(folder("gpt2")[0], strategy=TP).embed.weight.layout == "[128@tp, 64]"


# Keys without effect on results, and keys that a folder here must have.
WIDE = {
    **LLAMA, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 2,
    "sliding_window": 16, "max_position_embeddings": 8192,
}  # fmt: skip
FAMILIES = {
    "gpt2": GPT2,
    "llama": {**LLAMA, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 2},
    "mistral": {**LLAMA, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 2,
                "sliding_window": 16, "max_position_embeddings": 8192},
    "qwen2": {**LLAMA, "num_attention_heads": 32, "num_key_value_heads": 4,
              "use_sliding_window": True, "sliding_window": 16, "max_position_embeddings": 8192},
    "falcon": {**FALCON, "multi_query": False, "alibi": True, "bias": True,
               "parallel_attn": False, "ffn_hidden_size": 96, "layer_norm_epsilon": 1e-3},
    "qwen3": {**WIDE, "rms_norm_eps": 1e-3},
    "mixtral": {**WIDE, "num_local_experts": 4, "rms_norm_eps": 1e-3},
    "gemma": {**{k: v for k, v in WIDE.items() if "window" not in k}, "rms_norm_eps": 1e-3},
    "gemma2": {**WIDE, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0},
    "phi": {**LLAMA, "qk_layernorm": True, "layer_norm_eps": 1e-3},
    "phi3": {**LLAMA, "sliding_window": 16, "rms_norm_eps": 1e-3},
    "gpt_neox": {**LLAMA, "use_parallel_residual": False, "attention_bias": False},
}  # fmt: skip
NEEDED = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "n_embd", "n_layer", "n_head", "n_positions",
}  # fmt: skip
OPTIONAL = [(k, key) for k, raw in FAMILIES.items() for key in raw if key not in NEEDED]


@pytest.mark.parametrize(("kind", "key"), OPTIONAL)
def test_a_missing_key_means_what_transformers_means(kind: str, key: str) -> None:
    raw = {k: v for k, v in FAMILIES[kind].items() if k != key}
    whole = transformers.AutoConfig.for_model(kind, **raw).to_dict()
    assert ARCHITECTURES[kind].read(raw) == ARCHITECTURES[kind].read(whole)


def test_a_window_that_is_null_is_none() -> None:
    read = ARCHITECTURES["mistral"].read
    assert read({**FAMILIES["mistral"], "sliding_window": None}).windows == ()
    missing = {k: v for k, v in FAMILIES["mistral"].items() if "window" not in k}
    assert set(read(missing).windows) == {4096}


@pytest.mark.parametrize(
    "choice", [{"stacked": False}, {"context": "ring"}, {"sequence_parallel": "tp"}], ids=str
)
def test_how_a_model_is_run_is_not_asked_when_it_is_saved(
    choice: dict[str, Any], tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"vocab": 16, "seq": 8, "d": 8, "layers": 2, "heads": 2}
    plain, other = nn.GPT(nn.GPTConfig(**sizes)), nn.GPT(nn.GPTConfig(**sizes, **choice))
    values = plain.state_dict()
    if choice.get("stacked") is False:
        for name in [n for n in values if n.startswith("blocks.block.")]:
            rest, stack = name.removeprefix("blocks.block."), values.pop(name)
            values |= {f"blocks.layers.{i}.{rest}": stack[i] for i in range(2)}
    other.load_state_dict(values)
    save_hf(plain, tmp_path / "plain")
    save_hf(other, tmp_path / "other")
    a, b = (load_file(tmp_path / x / "model.safetensors") for x in ("plain", "other"))
    assert a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
