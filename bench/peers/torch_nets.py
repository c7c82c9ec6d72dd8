"""PyTorch's side of `bench/nets.py`: `torch_nets.py convnet|depthwise|moe FOLDER f32|bf16 HOW`.

It reads its weights and batch from FOLDER/given.npz and takes one step per line that it reads, on a
GPU if there is one. HOW is eager or compiled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from peers.net_sizes import CONVNET, DEPTHWISE, MOE, RATE
from torch import nn
from torch.nn import functional as F
from turns import serve


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        turned = stride != 1 or inputs != outputs
        self.past = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if turned else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.past(x))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = CONVNET.widths
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.blocks = nn.ModuleList(Block(*sizes) for sizes in CONVNET.blocks())
        self.head = nn.Linear(widths[-1], CONVNET.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean((2, 3)))


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        d, h = DEPTHWISE.width, DEPTHWISE.wide
        self.up = nn.Conv2d(d, h, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(h)
        self.apart = nn.Conv2d(h, h, 3, 1, 1, groups=h, bias=False)
        self.norm2 = nn.BatchNorm2d(h)
        self.down = nn.Conv2d(h, d, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.norm1(self.up(x)))
        return x + self.down(F.gelu(self.norm2(self.apart(h))))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DEPTHWISE.width, 3, 1, 1, bias=False)
        self.blocks = nn.ModuleList(Apart() for _ in range(DEPTHWISE.blocks))
        self.head = nn.Linear(DEPTHWISE.width, DEPTHWISE.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(self.stem(x), 3, 2, 1)
        for block in self.blocks:
            h = block(h)
        return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        d, h, e = MOE.width, MOE.hidden, MOE.experts
        self.router = nn.Parameter(torch.empty(d, e))
        self.up = nn.Parameter(torch.empty(e, d, h))
        self.down = nn.Parameter(torch.empty(e, h, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, MOE.width)
        gates, ids = torch.topk(F.softmax(rows @ self.router, -1), MOE.k)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for e in range(MOE.experts):
            at, choice = torch.where(ids == e)
            y = F.gelu(rows[at] @ self.up[e], approximate="tanh") @ self.down[e]
            out.index_add_(0, at, (y * gates[at, choice, None]).to(out.dtype))
        return out.reshape(x.shape)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MOE.width)
        self.moe = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(MOE.vocab, MOE.width)
        self.layers = nn.ModuleList(Layer() for _ in range(MOE.layers))
        self.head = nn.Linear(MOE.width, MOE.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h).flatten(0, 1)


def main() -> None:
    net, folder, dtype, how = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as on the other side
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = {"convnet": ConvNet, "depthwise": Depthwise, "moe": Mixed}[net]()
    with np.load(folder / "given.npz") as file:
        given = {name: torch.from_numpy(file[name]) for name in file.files}
    x, labels = given.pop("__x").to(where), given.pop("__labels").flatten().to(where)
    model = model.to(where)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):  # [in, out] there, [out, in] here
            given[f"{name}.weight"] = given[f"{name}.weight"].T
    named = dict(model.named_parameters())
    assert set(named) == set(given), set(named) ^ set(given)
    with torch.no_grad():
        for name, weight in named.items():
            weight.copy_(given[name])
    if net != "moe":
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    forward = torch.compile(model) if how == "compiled" else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(where, torch.bfloat16, enabled=dtype == "bf16"):
            loss = F.cross_entropy(forward(x), labels)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    peak = (lambda: torch.cuda.max_memory_allocated() / 1e6) if where == "cuda" else None
    serve(step, peak, torch=torch.__version__)


if __name__ == "__main__":
    main()
