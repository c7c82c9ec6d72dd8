"""Programs of several processes: compiled by one of them, equal on all."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cases import LONG
from tests.procs.harness import run_ranks

# Lists the programs over both processes that this process compiles itself.
BODY = """
import json
from jax._src import compiler
from tessera.runtime import compile_once
compile_once.BEGUN_S = 200.0  # also where the first process is late, on a busy machine
compiled = []
inner = compiler.backend_compile_and_load
def count(backend, module, devices, options, callbacks):
    name = str(module.operation.attributes["sym_name"]).strip('"')
    if len({d.process_index for d in devices}) > 1:
        compiled.append(name.removeprefix("jit_"))
    return inner(backend, module, devices, options, callbacks)
compiler.backend_compile_and_load = count

def mine():
    found = [*compiled]
    compiled.clear()
    return found

said = {}
weights = ts.tensor(np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), mesh=MESH)

@ts.jit(donate=("w",))
def step(w, x):
    loss = ts.tanh(x @ w).sum()
    return loss, w - 0.1 * ts.grad(loss, w)

loss, weights = step(weights, X)
said["step"] = mine().count("step")
loss, weights = step(weights, X)
said["bits"] = [loss.numpy().tobytes().hex(), weights.numpy().tobytes().hex()]
mine()
ts.clear_caches()  # what is let go of is compiled again, by each that needs it
step(weights, X)
said["again"] = mine().count("step")

import jax.numpy as jnp
where = X.stored.sharding
wrong = jax.jit(lambda x: x + 1, compiler_options={"xla_no_such_option": True})
try:
    wrong(X.stored)
except Exception as error:
    said["error"] = str(error).split("(")[0]
mine()

# One process alone compiles a program, and goes on alone.
compile_once.BEGUN_S = 0.2
if RANK:
    jax.jit(lambda x: x * 3, out_shardings=where).lower(X.stored).compile()
    said["alone"] = len(mine())
total = jax.jit(lambda x: jnp.sum(x * 2))(X.stored)
said["total"] = float(total)
said["last"] = len(mine())
print(json.dumps(said), flush=True)
"""


def ran(folder: Path, **env: str) -> list[dict[str, object]]:
    folder.mkdir()
    ended = run_ranks(BODY, folder, **{"TESSERA_COMPILE_ONCE": "1", **env})
    assert [e.code for e in ended] == [0, 0], ended
    return [json.loads(e.out.splitlines()[-1]) for e in ended]


def test_the_first_process_compiles_for_all(tmp_path: Path) -> None:
    first, second = ran(tmp_path / "once", TESSERA_PROGRAM_CACHE="off")
    assert (first["step"], second["step"]) == (1, 0)
    assert (first["again"], second["again"]) == (1, 1)
    assert first["error"] == second["error"] and "xla_no_such_option" in str(first["error"])
    assert (second["alone"], first["last"], second["last"]) == (1, 1, 1)
    each = ran(tmp_path / "each", TESSERA_COMPILE_ONCE="0", TESSERA_PROGRAM_CACHE="off")
    assert [said["step"] for said in each] == [1, 1]
    for said in (second, *each):
        assert (said["bits"], said["total"]) == (first["bits"], 56.0)


@LONG
def test_all_processes_find_what_an_earlier_run_has_compiled(tmp_path: Path) -> None:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    cold = ran(tmp_path / "cold", **cache)
    warm = ran(tmp_path / "warm", **cache)
    assert [said["step"] for said in cold] == [1, 0]
    assert [said["step"] for said in warm] == [0, 0]
    assert len({json.dumps(said["bits"]) for said in cold + warm}) == 1
