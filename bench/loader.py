"""The throughput of a data loader against the demo's training step.

The loader reads a mapped file of 50 million tokens, shuffled, and makes tensors of the demo's batch
size; the step is the demo's GPT (`gpt_step.ours`). The step also runs with a loader that gives its
batches, in turn with the step alone, to show the loader's part of the time. Run it: `python
bench/loader.py` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from gpt_step import ours
from peers import jax_gpt

from tessera.data import TokenLoader, create_dataloader
from tessera.runtime.devices import start

DEMO = jax_gpt.GPTConfig(vocab=1024, width=192, layers=3, heads=4, seq=128, batch=16)
TOKENS, DOCUMENT = 50_000_000, 300
EOS = 0


def write(folder: Path) -> Path:
    """Writes random tokens in documents of about `DOCUMENT` tokens, each closed by EOS."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, DEMO.vocab, TOKENS, dtype=np.uint16)
    ends = np.cumsum(rng.geometric(1 / DOCUMENT, TOKENS // DOCUMENT))
    tokens[ends[ends < TOKENS]] = EOS
    np.save(folder / "tokens.npy", tokens)
    return folder / "tokens.npy"


def tokens_per_s(loader: TokenLoader, rounds: int, batches: int = 400) -> float:
    """The median tokens per second over rounds, without the first, which starts the thread."""
    found = []
    with loader:
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            for _ in range(batches):
                batch = next(loader)
            found.append(batches * batch["input_ids"].size / (time.perf_counter() - begin))
    return statistics.median(found[1:])


def step_s(run: Callable[[], Any], before: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    before()
    run()
    return time.perf_counter() - begin


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--rounds", type=int, default=9)
    rounds = ap.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = {
            "data": str(write(Path(folder))), "batch_size": DEMO.batch,
            "sequence_length": DEMO.seq, "eos_token": EOS, "epochs": None,
        }  # fmt: skip
        kinds: dict[str, dict[str, Any]] = {
            "windows": {},
            "windows, segments": {"segment_ids": True},
            "documents, segments": {"packing": "documents", "segment_ids": True},
            "windows, 1 of 8 hosts": {"hosts": (0, 8)},
        }
        opened: dict[str, float] = {}
        speed: dict[str, float] = {}
        for name, more in kinds.items():
            begin = time.perf_counter()
            loader = create_dataloader({**config, **more})
            opened[name] = time.perf_counter() - begin
            speed[name] = tokens_per_s(loader, rounds)
        start(8)
        run, _ = ours(DEMO, {})
        run()
        with create_dataloader(config) as loader:
            next(loader)
            alone, fed = [], []
            for _ in range(3 * rounds):
                alone.append(step_s(run, lambda: None))
                fed.append(step_s(run, lambda: next(loader)["input_ids"].stored))
    step = statistics.median(alone)
    consumed = DEMO.batch * DEMO.seq / step
    print(json.dumps({
        "tokens": TOKENS,
        "batch": [DEMO.batch, DEMO.seq],
        "step_s": step,
        "fed_step_s": statistics.median(fed),
        "step_tokens_per_s": consumed,
        "loader_tokens_per_s": speed,
        "open_s": opened,
        "ratio": {name: found / consumed for name, found in speed.items()},
    }))  # fmt: skip


if __name__ == "__main__":
    main()
