"""Described machines, each with the sources of its figures.

Bandwidths are the makers', one direction of one device (of one wire between chips). Latencies of
NVLink, PCIe and InfiniBand are those of NCCL 2.1x's tuner for its ring and simple protocol; those
of Ethernet and of wires between chips are estimates. The speed of a device's additions is a third
of its memory bandwidth, as two values are read and one is written.

>>> preset("dgx_h100").of(4).size, preset("gb200_nvl72").host_count
(32, 18)
"""

from __future__ import annotations

from ..errors import MeshError
from ..topology import CLUSTERS, Link
from ..wording import nearest
from .chip import CHIPS
from .machine import Machine

_GUIDE = "Programming Mesh of Devices with TT-NN, 2.1: 200 Gb/s a link, both directions together"
_NCCL = "latencies: NCCL 2.1x, tuning.cc, ring with the simple protocol"
_ESTIMATE = "latency of 1 µs: an estimate"
WORMHOLE, BLACKHOLE = "wormhole_b0", "blackhole"
# The devices behind a PCIe id, by the shape of a host's mesh: a card of two chips in a row, one of
# them on PCIe. On a T3000 the cards are the halves of both rows, numbered round the box.
CARDS: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], ...]] = {
    (WORMHOLE, (1, 2)): ((0, 1),),
    (WORMHOLE, (2, 2)): ((0, 1), (2, 3)),
    (WORMHOLE, (2, 4)): ((0, 1), (4, 5), (6, 7), (2, 3)),
    (WORMHOLE, (4, 2)): ((0, 2), (1, 3), (5, 7), (4, 6)),
}


def _wormhole(name: str, note: str) -> Machine:
    t = CLUSTERS[name]
    cards = CARDS.get((WORMHOLE, t.shape), ())
    return Machine(WORMHOLE, t, ("y", "x"), (1, 1), cards, (), (f"{_GUIDE}; {note}", _ESTIMATE))


def _gpus(name: str, device: str, source: str, hosts: int | None = None) -> Machine:
    t = CLUSTERS[name]
    cut = (t.shape[0], 1 if hosts is None else hosts)
    chip = next(c for key, c in CHIPS.items() if key.upper() in device)
    return Machine(device, t, ("node", "gpu"), cut, (), (), (source, _NCCL), chip=chip)


def _tpus(name: str, device: str, source: str) -> Machine:
    t = CLUSTERS[name]
    hosts = (t.shape[0], t.shape[1] // 2, t.shape[2] // 2)  # a host has 2 x 2 chips
    return Machine(device, t, ("z", "y", "x"), hosts, (), (), (source, _ESTIMATE))


PRESETS: dict[str, Machine] = {
    m.name: m
    for m in (
        _wormhole("n300", "one of two links is left to the user"),
        _wormhole("t3000", "two links between neighbours"),
        _wormhole("galaxy", "four links between neighbours"),
        _gpus(
            "dgx_a100",
            "NVIDIA A100 80GB SXM",
            "NVIDIA DGX A100 datasheet: NVLink 600 GB/s a GPU, both directions; a ConnectX-6 of"
            " 200 Gb/s a GPU; 2,039 GB/s of memory",
        ),
        _gpus(
            "dgx_h100",
            "NVIDIA H100 SXM",
            "NVIDIA DGX H100 datasheet: NVLink 900 GB/s a GPU, both directions; a ConnectX-7 of"
            " 400 Gb/s a GPU; 3.35 TB/s of memory",
        ),
        _gpus(
            "dgx_h200",
            "NVIDIA H200 SXM",
            "NVIDIA DGX H200 datasheet: NVLink 900 GB/s a GPU, both directions; a ConnectX-7 of"
            " 400 Gb/s a GPU; 4.8 TB/s of memory",
        ),
        _gpus(
            "dgx_b200",
            "NVIDIA B200",
            "NVIDIA DGX B200 User Guide: NVLink 14.4 TB/s in all, both directions; 8 ConnectX-7 of"
            " 400 Gb/s; DGX B200 datasheet: 64 TB/s of memory",
        ),
        _gpus(
            "gb200_nvl72",
            "NVIDIA GB200",
            "NVIDIA GB200 NVL72 product page: NVLink 130 TB/s in all, both directions, 576 TB/s of"
            " memory; DGX GB200 datasheet: 72 ConnectX-7 of 400 Gb/s, 18 compute trays",
            hosts=18,
        ),
        _tpus(
            "tpu_v4",
            "TPU v4",
            "Jouppi et al., TPU v4 (ISCA 2023): 3D torus, 6 links of 50 GB/s a chip; 1,200 GB/s of"
            " memory",
        ),
        _tpus(
            "tpu_v5p",
            "TPU v5p",
            "Google Cloud, TPU v5p: 3D torus, 1,200 GB/s a chip over 6 links, both directions;"
            " 2,765 GB/s of memory",
        ),
    )
}
LINKS: dict[str, Link] = {v.link.name: v.link for t in CLUSTERS.values() for v in t.levels}
"""The described links, by their names."""
ALIASES = {"quietbox": "t3000", "t3k": "t3000", "tg": "galaxy", "nvl72": "gb200_nvl72"}


def preset(name: str) -> Machine:
    """Returns the machine described under `name`, in upper or lower case. Raises MeshError if there
    is none.

    >>> preset("N300").name, preset("QuietBox").name
    ('n300', 't3000')
    """
    low = name.lower() if isinstance(name, str) else ""
    found = PRESETS.get(ALIASES.get(low, low))
    if found is None:
        raise MeshError(
            f"preset: {name!r} is no described machine",
            rows=[("nearest", nearest(name, (*PRESETS, *ALIASES), 3))]
            if isinstance(name, str)
            else (),
            fix=f"name one of {', '.join(PRESETS)}, or give a descriptor file",
        )
    return found
