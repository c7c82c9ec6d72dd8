"""LoRA adapters against `peft`: files both ways, logits, gradients and training steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tessera as ts
from tessera import dist, nn, optim
from tessera.checkpoint import load_hf, load_peft, save_peft

peft: Any = pytest.importorskip("peft", reason="pip install peft")

# transformers' own, which peft asks for
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

IDS = np.random.default_rng(0).integers(1, 128, (2, 9))
TP2 = dist.Mesh(("tp",), shape={"tp": 2})
LLAMA = transformers.LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
GPT2 = transformers.GPT2Config(
    vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
CASES: dict[str, tuple[Any, Any, list[str], dict[str, Any]]] = {
    "llama": (transformers.LlamaForCausalLM, LLAMA, ["q_proj", "v_proj"], {}),
    "llama all": (transformers.LlamaForCausalLM, LLAMA, [
        "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"],
        {"use_rslora": True}),
    "gpt2": (transformers.GPT2LMHeadModel, GPT2, ["c_fc"], {"fan_in_fan_out": True}),
}  # fmt: skip


def theirs(name: str, path: Path) -> Any:
    """A base model of transformers with adapters of peft, both saved under `path`."""
    kind, config, targets, more = CASES[name]
    torch.manual_seed(0)
    base = kind(config).eval()
    base.save_pretrained(path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(
        r=4, lora_alpha=10, target_modules=targets, task_type="CAUSAL_LM", **more))  # fmt: skip
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_(0, 0.3)
    model.eval().save_pretrained(path / "adapter")
    return model


def logits(model: Any) -> Any:
    return ts.jit(lambda model, ids: model(ids))(model, ts.tensor(IDS.astype(np.int32))).numpy()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_adapters_come_from_peft_and_go_back(name: str, split: bool, tmp_path: Path) -> None:
    reference = theirs(name, tmp_path)
    want = reference(torch.tensor(IDS)).logits.detach().numpy()
    mesh, plan = (TP2, "tensor_parallel") if split else (None, None)
    model = load_hf(tmp_path / "base", mesh, plan, stacked=not split)
    assert abs(logits(model) - want).max() > 0.01
    load_peft(model, tmp_path / "adapter")
    np.testing.assert_allclose(logits(model), want, rtol=0, atol=2e-5)
    save_peft(model, tmp_path / "out")
    base = CASES[name][0].from_pretrained(tmp_path / "base")
    back = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    np.testing.assert_allclose(
        back(torch.tensor(IDS)).logits.detach().numpy(), want, rtol=0, atol=2e-5
    )
    merged = reference.merge_and_unload()(torch.tensor(IDS)).logits.detach().numpy()
    np.testing.assert_allclose(logits(nn.merge_lora(model)), merged, rtol=0, atol=2e-5)


def test_a_training_step_is_that_of_peft(tmp_path: Path) -> None:
    reference = theirs("llama", tmp_path)
    model = load_peft(load_hf(tmp_path / "base"), tmp_path / "adapter")
    labels = torch.tensor(IDS)
    for n, p in reference.named_parameters():
        p.requires_grad_("lora" in n)
    torch_opt = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], 0.5)
    opt = optim.SGD(0.5)
    state = opt.init(model.trainable_parameters())
    shifted = np.concatenate([IDS[:, 1:], np.full((2, 1), -100)], 1).astype(np.int32)

    @ts.jit
    def step(model: Any, state: Any, ids: ts.Tensor, labels: ts.Tensor) -> ts.Tensor:
        loss = model.loss(ids, labels)
        weights = model.trainable_parameters()
        weights, new = opt.update(weights, ts.grad(loss, weights), state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    for _ in range(3):
        want = reference(torch.tensor(IDS), labels=labels).loss
        torch_opt.zero_grad()
        want.backward()
        torch_opt.step()
        got = step(model, state, ts.tensor(IDS.astype(np.int32)), ts.tensor(shifted))
        assert got.item() == pytest.approx(want.item(), abs=1e-5)
    save_peft(model, tmp_path / "out")
    reference.save_pretrained(tmp_path / "theirs")
    from safetensors.numpy import load_file

    a, b = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("out", "theirs"))
    assert {*a} == {*b}
    for name, value in b.items():
        np.testing.assert_allclose(a[name], value, rtol=0, atol=2e-5)


def test_modules_of_pytorch_have_adapters(tmp_path: Path) -> None:
    reference = theirs("llama", tmp_path)
    want = reference(torch.tensor(IDS)).logits.detach().numpy()
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    model = ts.from_torch(base, (), {"input_ids": torch.tensor(IDS), "use_cache": False})
    load_peft(model, tmp_path / "adapter")
    call = ts.jit(lambda model, ids: model(input_ids=ids, use_cache=False)["logits"])
    ids = ts.tensor(IDS.astype(np.int32))
    np.testing.assert_allclose(call(model, ids).numpy(), want, rtol=0, atol=2e-5)
    names = [str(n) for n in model.trainable_parameters()]
    assert len(names) == 8 and all("lora" in n for n in names)
    save_peft(model, tmp_path / "out")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    np.testing.assert_allclose(
        again(torch.tensor(IDS)).logits.detach().numpy(), want, rtol=0, atol=2e-5
    )
    nn.merge_lora(model)
    np.testing.assert_allclose(call(model, ids).numpy(), want, rtol=0, atol=2e-5)


def test_folders_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    theirs("llama", tmp_path)
    model = load_hf(tmp_path / "base")
    with pytest.raises(ts.UsageError, match="the model has no adapter"):
        save_peft(model, tmp_path / "out")
    path = tmp_path / "adapter" / "adapter_config.json"
    said = json.loads(path.read_text())
    for key, value in (("use_dora", True), ("bias", "all"), ("peft_type", "IA3"),
                       ("modules_to_save", ["x"]), ("alpha_pattern", {"q_proj": 3}),
                       ("init_lora_weights", "pissa")):  # fmt: skip
        path.write_text(json.dumps({**said, key: value}))
        with pytest.raises(ts.UsageError, match=f"load_peft: adapter_config.json: '{key}' is"):
            load_peft(model, tmp_path / "adapter")
    path.write_text(json.dumps(said))
    other = nn.GPT(nn.GPTConfig(vocab=128, seq=64, d=32, layers=2, heads=4))
    with pytest.raises(ts.UsageError, match="load_peft: "):
        load_peft(other, tmp_path / "adapter")
    small = load_hf(transformers.LlamaConfig(**{**LLAMA.to_dict(), "hidden_size": 16}))
    with pytest.raises(ts.ShapeError, match="does not fit the model"):
        load_peft(small, tmp_path / "adapter")
    assert not small.parameters()["embed.weight"].frozen  # nothing was changed
    with pytest.raises(ts.UsageError, match=r"load_peft: .*adapter_config.json"):
        load_peft(model, tmp_path / "base")
    load_peft(model, tmp_path / "adapter")
    with pytest.raises(ts.UsageError, match="holds adapters already"):
        save_peft(model, tmp_path / "adapter")
    fused = nn.lora(load_hf(GPT2), r=2, targets="*.q")
    with pytest.raises(ts.UsageError, match="fused with others"):
        save_peft(fused, tmp_path / "fused")
