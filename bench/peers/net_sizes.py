"""Network sizes of `bench/nets.py` for both sides: those of a CPU, or of a GPU if BENCH_LARGE is
set."""

from __future__ import annotations

import os
from dataclasses import dataclass

RATE = 1e-4


@dataclass(frozen=True)
class ConvNetSizes:
    batch: int = 64
    widths: tuple[int, ...] = (32, 64, 128)
    classes: int = 10

    def blocks(self) -> list[tuple[int, int, int]]:
        """(channels in, channels out, stride) of each block: two for each width."""
        before = (self.widths[0], *self.widths)
        return [
            (i if k == 0 else o, o, 2 if k == 0 and n else 1)
            for n, (i, o) in enumerate(zip(before, self.widths, strict=False))
            for k in (0, 1)
        ]


@dataclass(frozen=True)
class DepthwiseSizes:
    batch: int = 32
    width: int = 64
    wide: int = 128  # within a block
    blocks: int = 4
    classes: int = 10


@dataclass(frozen=True)
class MoESizes:
    batch: int = 16
    seq: int = 256
    vocab: int = 1024
    width: int = 256
    hidden: int = 512
    experts: int = 8
    k: int = 2
    layers: int = 4


if os.environ.get("BENCH_LARGE"):
    CONVNET = ConvNetSizes(batch=512, widths=(64, 128, 256))
    DEPTHWISE = DepthwiseSizes(batch=256, width=128, wide=512)
    MOE = MoESizes(batch=32, seq=512, vocab=8192, width=1024, hidden=2048)
else:
    CONVNET, DEPTHWISE, MOE = ConvNetSizes(), DepthwiseSizes(), MoESizes()
