"""A small Llama that writes text on a mesh, with TT-NN's API: tensor parallel within each part of
the mesh, data parallel over the parts, one captured trace for a token.

Each part of 1 x N devices holds the whole model, cut over its devices: a device has some of the
heads with their cache, and some of the columns of the MLP. A token takes one trace of all parts,
which reads the tokens of the step before and writes the next ones. The weights are random, and the
tokens are those of `transformers` on the same weights.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import tessera.ttnn as ttnn


def weights_on(device: ttnn.MeshDevice, model: LlamaForCausalLM) -> dict[str, Any]:
    """The model's weights on one part of the mesh, each cut over its devices or on all of them."""
    config, n = model.config, device.get_num_devices()

    def put(x: torch.Tensor, dim: int | None = None) -> ttnn.Tensor:
        mapper = (
            ttnn.ReplicateTensorToMesh(device)
            if dim is None
            else ttnn.ShardTensorToMesh(device, dim)
        )
        rows = x.detach().reshape([1] * (4 - x.ndim) + list(x.shape))
        return ttnn.from_torch(rows, layout=ttnn.TILE_LAYOUT, device=device, mesh_mapper=mapper)

    def heads(attention: Any) -> torch.Tensor:
        """[width, ...]: for each device the queries, keys and values of its heads."""
        parts = [p.weight.T.chunk(n, -1) for p in (attention.q_proj, attention.k_proj,
                                                   attention.v_proj)]  # fmt: skip
        return torch.cat([part for each in zip(*parts) for part in each], -1)

    size = config.head_dim
    turns = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(config.max_position_embeddings), turns).repeat(1, 2)
    layers = [
        {
            "qkv": put(heads(layer.self_attn), -1),
            "out": put(layer.self_attn.o_proj.weight.T, -2),
            "gate": put(layer.mlp.gate_proj.weight.T, -1),
            "up": put(layer.mlp.up_proj.weight.T, -1),
            "down": put(layer.mlp.down_proj.weight.T, -2),
            "norm": put(layer.input_layernorm.weight),
            "norm_mlp": put(layer.post_attention_layernorm.weight),
        }
        for layer in model.model.layers
    ]
    return {
        "tokens": put(model.model.embed_tokens.weight), "cos": put(angles.cos()),
        "sin": put(angles.sin()), "norm": put(model.model.norm.weight),
        "head": put(model.lm_head.weight.T, -1), "layers": layers,
    }  # fmt: skip


class Decoder:
    """The model on one part of the mesh, with the users of that part: their tokens, places and
    caches are tensors that stay where they are."""

    def __init__(self, device: ttnn.MeshDevice, model: LlamaForCausalLM, users: int) -> None:
        self.device, self.users, self.config = device, users, model.config
        self.weights = weights_on(device, model)
        n = device.get_num_devices()
        self.heads, self.groups = (
            model.config.num_attention_heads // n,
            model.config.num_key_value_heads // n,
        )
        shape = (users, self.groups, model.config.max_position_embeddings, model.config.head_dim)
        self.caches = [
            [ttnn.zeros(shape, ttnn.float32, device=device) for _ in range(2)]
            for _ in model.model.layers
        ]
        self.ids, self.places = (
            ttnn.zeros((1, users), ttnn.int32, device=device) for _ in range(2)
        )

    def rotated(self, x: ttnn.Tensor, cos: ttnn.Tensor, sin: ttnn.Tensor) -> ttnn.Tensor:
        half = self.config.head_dim // 2
        turned = ttnn.concat([ttnn.neg(x[..., half:]), x[..., :half]], dim=-1)
        return ttnn.add(ttnn.mul(x, cos), ttnn.mul(turned, sin))

    def attention(
        self, x: ttnn.Tensor, layer: dict[str, Any], caches: Any, cos: Any, sin: Any
    ) -> ttnn.Tensor:
        size, users = self.config.head_dim, self.users
        widths = [self.heads * size, self.groups * size, self.groups * size]
        q, k, v = ttnn.split(ttnn.linear(x, layer["qkv"]), widths, dim=-1)
        q = self.rotated(ttnn.reshape(q, (1, users, self.heads, size)), cos, sin)
        k = self.rotated(ttnn.reshape(k, (1, users, self.groups, size)), cos, sin)
        v = ttnn.reshape(v, (1, users, self.groups, size))
        for cache, new in zip(caches, (k, v)):
            ttnn.experimental.paged_update_cache(cache, new, update_idxs_tensor=self.places)
        seen = ttnn.transformer.scaled_dot_product_attention_decode(
            q, *caches, cur_pos_tensor=self.places
        )
        rows = ttnn.reshape(seen, (1, 1, users, self.heads * size))
        return ttnn.all_reduce(ttnn.linear(rows, layer["out"]))

    def mlp(self, x: ttnn.Tensor, layer: dict[str, Any]) -> ttnn.Tensor:
        gate = ttnn.linear(x, layer["gate"], activation="silu")
        return ttnn.all_reduce(
            ttnn.linear(ttnn.mul(gate, ttnn.linear(x, layer["up"])), layer["down"])
        )

    def step(self) -> None:
        """Reads the tokens at their places, and writes the next ones."""
        w, users, size = self.weights, self.users, self.config.head_dim
        epsilon = self.config.rms_norm_eps
        x = ttnn.reshape(ttnn.embedding(self.ids, w["tokens"]), (1, 1, users, -1))
        cos, sin = (
            ttnn.reshape(ttnn.embedding(self.places, w[name]), (1, users, 1, size))
            for name in ("cos", "sin")
        )
        for layer, caches in zip(w["layers"], self.caches):
            rows = ttnn.rms_norm(x, epsilon=epsilon, weight=layer["norm"])
            x = ttnn.add(x, self.attention(rows, layer, caches, cos, sin))
            rows = ttnn.rms_norm(x, epsilon=epsilon, weight=layer["norm_mlp"])
            x = ttnn.add(x, self.mlp(rows, layer))
        x = ttnn.linear(ttnn.rms_norm(x, epsilon=epsilon, weight=w["norm"]), w["head"])
        chosen = ttnn.argmax(ttnn.all_gather(x, dim=3), dim=-1)
        ttnn.clone(ttnn.reshape(chosen, (1, users)), dtype=ttnn.int32, output_tensor=self.ids)
        ttnn.add_(self.places, 1)

    def write(self, tensor: ttnn.Tensor, values: torch.Tensor) -> None:
        host = ttnn.from_torch(
            values.to(torch.int32).reshape(1, -1), layout=ttnn.TILE_LAYOUT,
            mesh_mapper=ttnn.ReplicateTensorToMesh(self.device),
        )  # fmt: skip
        ttnn.copy_host_to_device_tensor(host, tensor)

    def tokens(self) -> torch.Tensor:
        return ttnn.to_torch(ttnn.get_device_tensors(self.ids)[0]).reshape(-1)


def small_llama(seed: int) -> LlamaForCausalLM:
    """A model with random weights, of a size for two CPU cores."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=128,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def main(
    rows: Annotated[int, typer.Option(help="Parts of the mesh, each with users of its own.")] = 2,
    columns: Annotated[int, typer.Option(help="Devices of a part: 1, 2 or 4.")] = 4,
    users: Annotated[int, typer.Option(help="Users of each part.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens that are written for each user.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the weights and the prompts.")] = 0,
) -> None:
    """Writes text for all users, and compares it with what transformers writes."""
    model = small_llama(seed)
    prompt = torch.randint(0, model.config.vocab_size, (rows * users, 8))
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(rows, columns))
    ttnn.visualize_mesh_device(mesh)
    parts = [
        Decoder(device, model, users)
        for device in mesh.create_submeshes(ttnn.MeshShape(1, columns))
    ]

    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    for part in parts:
        part.step()
    ttnn.end_trace_capture(mesh, trace, cq_id=0)

    written = []
    for part in parts:
        part.write(part.places, torch.zeros(users))
    for i in range(prompt.shape[1] + tokens - 1):
        if i < prompt.shape[1]:  # the prompt is read token by token
            for part, own in zip(parts, prompt.chunk(rows)):
                part.write(part.ids, own[:, i])
        elif i == prompt.shape[1]:
            began_s = time.perf_counter()
        ttnn.execute_trace(mesh, trace, cq_id=0, blocking=False)
        if i >= prompt.shape[1] - 1:
            written.append(torch.cat([part.tokens() for part in parts]))
    took_s = time.perf_counter() - began_s
    found = torch.stack(written, 1)

    with torch.no_grad():
        wanted = model.generate(
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )[:, prompt.shape[1] :]  # fmt: skip
    for user, row in enumerate(found.tolist()):
        print(f"user {user}: {' '.join(map(str, row[:12]))} ...")
    speed = (tokens - 1) * len(prompt) / took_s
    print(f"{speed:.0f} tokens/s for {len(prompt)} users, {(tokens - 1) / took_s:.0f} for each")
    same = int((found == wanted).all(-1).sum())
    print(f"{same} of {len(prompt)} users have the tokens of transformers")
    ttnn.release_trace(mesh, trace)
    ttnn.close_mesh_device(mesh)
    if same < len(prompt):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
