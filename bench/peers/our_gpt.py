"""A Tessera worker of `bench/fsdp.py --processes`: one GPT step per line that it reads.

`our_gpt.py RANK PROCESSES PORT LAYERS ZERO`. It has one device, and its share of the batch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    rank, processes, port, layers, zero = map(int, sys.argv[1:])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "TESSERA_DEVICES": "1"}  # fmt: skip
    # A device is a core; the peer's processes have one thread each as well.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo writes there
    from gpt_step import ours
    from peers import jax_gpt
    from turns import serve

    from tessera.runtime.devices import start

    start(processes)
    run, _ = ours(jax_gpt.GPTConfig(layers=layers), {"dp": processes}, zero=zero)
    serve(run)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
