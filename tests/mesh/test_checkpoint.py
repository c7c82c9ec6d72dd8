"""Checkpoints: restored exactly on any mesh, and damage found."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import tessera as ts
from tessera import checkpoint, dist, nn, optim
from tessera.checkpoint.manifest import Manifest
from tessera.checkpoint.pieces import Reader
from tessera.checkpoint.storage import Storage
from tessera.launch.cli import app

CONFIG = nn.GPTConfig(64, 16, 32, 2, 4, dropout=0.1)
RNG = np.random.default_rng(0)
OPTIMIZER = optim.AdamW(1e-2)
PLAIN = dist.strategy("data_parallel")
ZERO3 = dist.strategy("zero_redundancy_optimizer", stage=3)
TP = dist.strategy("tensor_parallel")


def made(mesh: dist.Mesh, plan: Any) -> tuple[Any, Any]:
    ts.seed(0)
    model = dist.place(nn.GPT(CONFIG), plan, mesh)
    return model, OPTIMIZER.init(model.parameters(), plan)


def trained(mesh: dist.Mesh, plan: Any, model: Any, state: Any, steps: range) -> list[float]:
    @ts.jit
    def step(model: Any, state: Any, ids: Any, labels: Any) -> Any:
        loss = model.loss(ids, labels)
        weights = model.parameters()
        weights, new = OPTIMIZER.update(weights, ts.grad(loss, weights, layout=plan), state)
        model.load_parameters(weights)
        state.update(new)
        return loss

    tokens = np.random.default_rng(1).integers(0, 64, (8, 8, 17)).astype(np.int32)
    losses = []
    for i in steps:
        row = dist.place((tokens[i][:, :-1], tokens[i][:, 1:]), plan, mesh, kind="batch")
        losses.append(step(model, state, *row).item())
    return losses


def values(tree: Any) -> dict[str, Any]:
    return {k: np.asarray(v.numpy()) for k, v in tree.items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


PLACES: dict[str, tuple[Callable[[], dist.Mesh], Any]] = {
    "dp=8, ZeRO-3": (lambda: dist.Mesh.parse("dp=8"), ZERO3),
    "dp=2 tp=2": (lambda: dist.Mesh.parse("dp=2 tp=2"), PLAIN + TP),
    "folded": (lambda: dist.Mesh.parse("dp=4 tp=2").fold(onto="dp=2,tp=1"), ZERO3 + TP),
    "uneven": (lambda: dist.Mesh.parse("dp=3"), ZERO3),
    "one device": (lambda: dist.Mesh.parse("dp=1"), PLAIN),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_goes_from_any_mesh_to_any_other(place: str, tmp_path: Path) -> None:
    """Saves on one mesh, loads on each of the others, saves there, and loads by name."""
    make, plan = PLACES[place]
    model, state = made(make(), plan)
    want = values(model.state_dict())
    checkpoint.save("a", model, state, root=tmp_path, step=1, async_io=False, quiet=True)
    for other, (to, there) in PLACES.items():
        ts.seed(5)
        again = dist.place(nn.GPT(CONFIG), there, to())
        fresh = OPTIMIZER.init(again.parameters(), there)
        types = {k: t.type for k, t in again.parameters().items()}
        found = checkpoint.load("a", again, fresh, root=tmp_path)
        assert same(values(again.state_dict()), want), other
        assert {k: t.type for k, t in again.parameters().items()} == types
        assert found.step == 1 and found.optimizer["step"].item() == state["step"].item()
        tag = f"b{len(other)}"
        checkpoint.save(tag, again, found.optimizer, root=tmp_path, quiet=True)
        by_name = checkpoint.load(tag, root=tmp_path)
        assert same(values(by_name.tensors), want), other
        assert by_name.tensors["embed.weight"].mesh is None


def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    """Weights, moments, the step count and the state of dropout's random generator."""
    mesh, plan = dist.Mesh.parse("dp=4 tp=2"), ZERO3 + TP
    model, state = made(mesh, plan)
    ts.seed(3)
    whole = trained(mesh, plan, model, state, range(6))
    want = values(model.state_dict())
    model, state = made(mesh, plan)
    ts.seed(3)
    first = trained(mesh, plan, model, state, range(3))
    checkpoint.save("half", model, state, root=tmp_path, step=3, quiet=True)
    first += trained(mesh, plan, model, state, range(3, 5))  # steps that the resumed run repeats
    again, fresh = made(mesh, plan)
    ts.seed(99)
    found = checkpoint.load(None, again, fresh, root=tmp_path)
    assert found.step == 3 and first == whole[:5]
    assert trained(mesh, plan, again, found.optimizer, range(3, 6)) == whole[3:]
    assert same(values(again.state_dict()), want)


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    """The next step reuses the weights' memory while the thread writes."""
    mesh = dist.Mesh.parse("dp=4")
    model, state = made(mesh, ZERO3)
    trained(mesh, ZERO3, model, state, range(1))
    want = values(model.state_dict())
    checkpoint.save("now", model, state, root=tmp_path, quiet=True)
    trained(mesh, ZERO3, model, state, range(1, 3))
    checkpoint.wait()
    assert same(values(checkpoint.load("now", root=tmp_path).tensors), want)


def test_all_kinds_of_values(tmp_path: Path) -> None:
    mesh = dist.Mesh.parse("dp=2 tp=4")
    x = ts.tensor(RNG.normal(size=(8, 6)).astype(np.float32), mesh=mesh, layout="[8@dp, 6]")
    tree = {
        "sum": x.sum(0),
        "bf16": x.to("bf16"),
        "bool": x > 0,
        "empty": ts.zeros((0, 3)),
        "scalar": ts.tensor(2.5),
        "rows": [ts.arange(5), np.arange(3, dtype=np.uint8)],
        "moved": ts.jit(lambda x: x.reshape(4, 12))(x),
    }
    assert "+dp" in str(tree["sum"].type)
    state = {"loader": {"sample": 7}, "note": "text", "list": [1, None, 0.5]}
    checkpoint.save("t", tree, {"rate": 0.1, "count": 3, "name": "adam", "none": None},
                    root=tmp_path, state=state, metrics={"loss": ts.tensor(1.5)})  # fmt: skip
    want = ts.lang.record.tree.flatten(tree)[0]  # the load fills the tree itself
    found = checkpoint.load("t", tree, {"rate": 1.0, "count": 1, "name": "", "none": None},
                            root=tmp_path)  # fmt: skip
    for a, b in zip(want, ts.lang.record.tree.flatten(found.tensors)[0], strict=True):
        assert a is not b
        assert np.asarray(a if isinstance(a, np.ndarray) else a.numpy()).tobytes() == (
            b.numpy().tobytes()
        )
    assert found.optimizer == {"rate": 0.1, "count": 3, "name": "adam", "none": None}
    assert found.state == state and found.metrics == {"loss": 1.5}
    narrow = checkpoint.load("t", {"bf16": tree["bf16"]}, root=tmp_path, only="bf16", dtype="f32")
    assert narrow.tensors["bf16"].dtype is ts.f32


def test_a_part_is_read_where_a_part_is_held(tmp_path: Path) -> None:
    """Each device reads its own rows: no more of a file than the pieces that hold them."""
    mesh = dist.Mesh.parse("dp=4")
    x = ts.tensor(RNG.normal(size=(8, 4)).astype(np.float32), mesh=mesh, layout="[8@dp, 4]")
    checkpoint.save("t", {"a.w": x, "b.w": x * 2}, root=tmp_path, quiet=True)
    part = checkpoint.load("t", {"a.w": x, "b.w": x}, root=tmp_path, only=["b.*"])
    assert part.tensors["a.w"] is x
    np.testing.assert_array_equal(part.tensors["b.w"].numpy(), x.numpy() * 2)
    manifest = Manifest.model_validate(json.loads((tmp_path / "t" / "manifest.json").read_text()))
    assert [p.start for p in manifest.tensors["tensors/a.w"].pieces] == [[0, 0], [2, 0], [4, 0], [6, 0]]  # noqa: E501  # fmt: skip


def test_a_folded_mesh_reads_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if blocks are short or empty, or a dim has two axes or several factors."""
    mesh = dist.Mesh.parse("dp=4 tp=2").fold(onto="dp=2,tp=1")
    tree, like = {}, {}
    shapes = {"[10@dp, 6@tp]": (10, 6), "[9@(dp,tp), 5]": (9, 5), "[3, 7@(tp,dp)]": (3, 7)}
    shapes |= {"[5, (3·8@tp·4)]": (5, 96), "[(3·5@dp·2)]": (30,), "[(8@dp·5@tp), 3]": (40, 3)}
    for layout, shape in {**shapes, "[5@tp]": (5,)}.items():
        tree[layout] = RNG.normal(size=shape).astype(np.float32)
        like[layout] = ts.tensor(np.zeros(shape, np.float32), mesh=mesh, layout=layout)
    checkpoint.save("t", {**tree, "one": np.float32(2)}, root=tmp_path, quiet=True)
    cuts, fill = list[Any](), Reader.fill

    def seen(self: Any, name: str, parts: Any) -> None:
        cuts.extend((name, [s.stop - s.start for s in cut]) for cut, _ in parts)
        fill(self, name, parts)

    monkeypatch.setattr(Reader, "fill", seen)
    one = ts.tensor(np.float32(0), mesh=mesh)
    found = checkpoint.load("t", {**like, "one": one}, root=tmp_path).tensors
    assert {k: v.numpy().tolist() for k, v in found.items()} == {
        **{k: v.tolist() for k, v in tree.items()}, "one": 2.0,
    }  # fmt: skip
    most = {"[10@dp, 6@tp]": [3, 3], "[9@(dp,tp), 5]": [2, 5], "[3, 7@(tp,dp)]": [3, 1]}
    most |= {"[5, (3·8@tp·4)]": [5, 16], "[(3·5@dp·2)]": [4], "[(8@dp·5@tp), 3]": [3, 3]}
    for layout, size in most.items():
        assert max(c for n, c in cuts if n == f"tensors/{layout}") == size


def test_a_load_that_takes_a_while_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also during the read of the only tensor, and of a tensor read by name."""
    tree, fill = {"w": np.ones(3)}, Reader.fill
    checkpoint.save("t", tree, root=tmp_path, quiet=True)
    checkpoint.load("t", tree, root=tmp_path)
    assert capsys.readouterr().err == ""

    def slowly(*given: Any) -> None:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()
        fill(*given)

    monkeypatch.setattr(Reader, "fill", slowly)
    monkeypatch.setattr(checkpoint.loading, "SHOWN_AFTER_S", 0.0)
    for like in (tree, None):
        checkpoint.load("t", like, root=tmp_path)
        said = capsys.readouterr().err
        assert "checkpoint: loading" in said and "100%" in said


def test_policies_of_keeping(tmp_path: Path) -> None:
    keep = checkpoint.Keep(last=2, every=3, best=1, metric="loss")
    losses = [5.0, 1.0, 4.0, 3.0, 2.0, 6.0, 7.0]
    for step, loss in enumerate(losses, 1):
        checkpoint.save(f"s{step}", {"w": np.full(4, step)}, root=tmp_path, step=step, keep=keep,
                        metrics={"loss": loss}, quiet=True)  # fmt: skip
    checkpoint.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s2", "s3", "s6", "s7"]
    assert checkpoint.latest(tmp_path) == "s7"
    assert checkpoint.prune(1, tmp_path) == ["s2", "s3", "s6"]
    checkpoint.save("s7", {"w": np.zeros(4)}, root=tmp_path, async_io=False, quiet=True)
    assert len(list((tmp_path / "s7").iterdir())) == 2  # the earlier files are deleted
    assert checkpoint.load(root=tmp_path).tensors["w"].numpy().tolist() == [0] * 4


def saved(folder: Path) -> Path:
    tree = {f"w{i}": RNG.normal(size=(50, 8)).astype(np.float32) for i in range(4)}
    checkpoint.save("t", tree, root=folder, async_io=False, quiet=True)
    return folder / "t"


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """In the data and in the manifest: the error names the tensor and the file, or the manifest."""
    place = saved(tmp_path)
    draw = random.Random(0)
    for _ in range(200):
        path = draw.choice(sorted(place.iterdir()))
        raw = path.read_bytes()
        at = draw.randrange(len(raw))
        path.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << draw.randrange(8))]) + raw[at + 1 :])
        with pytest.raises(ts.CheckpointError) as caught:
            checkpoint.verify("t", tmp_path)
        if path.suffix == ".bin":
            assert path.name in str(caught.value) and "tensors/w" in str(caught.value)
        path.write_bytes(raw)
    assert checkpoint.verify("t", tmp_path) == 4 * 50 * 8 * 4


def test_files_that_are_cut_missing_or_foreign(tmp_path: Path) -> None:
    place = saved(tmp_path)
    (data,) = place.glob("*.bin")
    raw = data.read_bytes()
    for content, says in ((raw[:-1], "it has 6399 bytes, not 6400"), (None, "the file is missing"),
                          (raw + b"x", "it has more than 6400 bytes")):  # fmt: skip
        data.unlink() if content is None else data.write_bytes(content)
        with pytest.raises(ts.CheckpointError, match=says):
            checkpoint.load("t", root=tmp_path)
    data.write_bytes(raw)
    shutil.copytree(place, tmp_path / "other")
    with pytest.raises(ts.CheckpointError, match="is that of 't'"):
        checkpoint.load("other", root=tmp_path)
    (place / "manifest.json").write_text("{}")
    with pytest.raises(ts.CheckpointError, match="not one that Tessera wrote"):
        checkpoint.load("t", root=tmp_path)


EDITS: dict[str, Callable[[Any], object]] = {
    "a file outside": lambda m: m["tensors"]["tensors/w0"]["pieces"][0].update(file="../../x.bin"),
    "a huge shape": lambda m: m["tensors"]["tensors/w0"].update(shape=[1 << 40, 8]),
    "a piece outside": lambda m: m["tensors"]["tensors/w0"]["pieces"][0].update(start=[1, 0]),
    "another size": lambda m: m["tensors"]["tensors/w0"]["pieces"][0].update(bytes=8),
    "a piece twice": lambda m: m["tensors"]["tensors/w0"]["pieces"].append(
        m["tensors"]["tensors/w0"]["pieces"][0]
    ),
    "no pieces": lambda m: m["tensors"]["tensors/w0"].update(pieces=[]),
    "another dtype": lambda m: m["tensors"]["tensors/w0"].update(dtype="object"),
    "a text as a number": lambda m: m.update(sequence="1"),
    "a name of nothing": lambda m: m["tensors"].update({"../w": m["tensors"].pop("tensors/w0")}),
    "a name twice": lambda m: m["values"].update({"tensors/w0": 3}),
    "no random state": lambda m: m.update(random={}),
    "a seed of any size": lambda m: m["random"].update(seed=1 << 200),
    "something more": lambda m: m.update(run="rm"),
    "a later version": lambda m: m.update(version=2),
}


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    (data,) = saved(tmp_path).glob("*.bin")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(ts.CheckpointError, match="the file is missing"):
        checkpoint.verify("t", tmp_path)


@pytest.mark.parametrize("edit", EDITS)
def test_a_manifest_that_was_edited_is_refused(edit: str, tmp_path: Path) -> None:
    """Also if its digest was edited to match."""
    path = saved(tmp_path) / "manifest.json"
    content = json.loads(path.read_text())
    EDITS[edit](content)
    path.write_text(json.dumps(content))
    with pytest.raises(ts.CheckpointError, match=r"changed after|has version 2"):
        checkpoint.load("t", root=tmp_path)
    from tessera.checkpoint.manifest import _digest

    content.pop("digest")
    path.write_text(json.dumps({**content, "digest": _digest(content)}))
    with pytest.raises(ts.CheckpointError, match="cannot be used"):
        checkpoint.load("t", root=tmp_path)
    assert checkpoint.latest(tmp_path) is None


def test_a_disk_that_refuses_is_reported_while_training_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "root"
    checkpoint.save("good", {"w": np.ones(3)}, root=root, async_io=False, quiet=True)
    (root / "bad").write_text("a file is in the way")
    checkpoint.save("bad", {"w": np.ones(3)}, root=root, quiet=True)  # it occurs in the thread
    with pytest.raises(ts.CheckpointError, match=r"cannot be written: .*exists"):
        checkpoint.wait()
    assert checkpoint.latest(root) == "good" and checkpoint.verify("good", root)
    checkpoint.save("next", {"w": np.ones(3)}, root=root, quiet=True)
    checkpoint.wait()
    assert checkpoint.latest(root) == "next"


SOME = {"w": np.ones(2, np.float32)}
ERRORS: list[tuple[Callable[[Path], object], type[ts.TesseraError], str]] = [
    (lambda r: checkpoint.save("a/b", SOME, root=r), ts.UsageError, "tag cannot be 'a/b'"),
    (lambda r: checkpoint.save("latest", SOME, root=r), ts.UsageError, "tag cannot be 'latest'"),
    (lambda r: checkpoint.save("a", {"f": len}, root=r), ts.UsageError, "tensors/f cannot be"),
    (lambda r: checkpoint.save("a", SOME, root=r, atomic=False), ts.UsageError, "is atomic"),
    (lambda r: checkpoint.save("a", SOME, root=r, keep=0), ts.UsageError, "keep cannot be 0"),
    (lambda r: checkpoint.save("a", SOME, root=r, step=-1), ts.UsageError, "step cannot be -1"),
    (lambda r: checkpoint.save("a", SOME, root=r, state=len), ts.UsageError, "written as JSON"),
    (lambda r: checkpoint.save("a", SOME, root=r, metrics={"m": "x"}), ts.UsageError, "metrics"),
    (lambda r: checkpoint.save("a", SOME, root=3), ts.UsageError, "root cannot be 3"),
    (lambda r: checkpoint.load(root=r), ts.CheckpointError, "has no checkpoint"),
    (lambda r: checkpoint.load("no", root=r), ts.CheckpointError, "'no' is not in"),
    (lambda r: checkpoint.load(root=r, only=3), ts.UsageError, "only cannot be 3"),
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(ERRORS)))
def test_errors_say_what_to_do(k: int, tmp_path: Path) -> None:
    run, kind, says = ERRORS[k]
    with pytest.raises(kind) as caught:
        run(tmp_path)
    assert says in str(caught.value) and "fix" in str(caught.value)


def test_a_checkpoint_that_another_process_removes_now_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(tmp_path)
    for tag in ("gone", "stays"):
        storage.make(tag)
        storage.write(f"{tag}/file", b"x")
    inside = Path.iterdir

    def removed_meanwhile(folder: Path) -> Iterator[Path]:
        found = [*inside(folder)]
        if folder == tmp_path:
            shutil.rmtree(tmp_path / "gone")
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", removed_meanwhile)
    assert storage.listed() == ["stays/file"]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tag in ("gone", "stays"):
        checkpoint.save(tag, {"w": np.ones(4)}, root=tmp_path, async_io=False, quiet=True)
    listed, read = Storage.listed, Storage.read

    def removing(of: str) -> Any:
        def run(storage: Storage, key: str, *more: Any) -> Any:
            if key.startswith("gone/") and of in key:
                shutil.rmtree(tmp_path / "gone", ignore_errors=True)
            return read(storage, key, *more)

        return run

    for of in ("manifest", "data"):  # before its manifest is read, and before its tensors are
        monkeypatch.setattr(Storage, "read", removing(of))
        told = CliRunner().invoke(app, ["ckpt", "ls", str(tmp_path), "--verify"]).output
        assert "stays" in told and "gone" not in told, told
        monkeypatch.setattr(Storage, "read", read)
        checkpoint.save("gone", {"w": np.ones(4)}, root=tmp_path, async_io=False, quiet=True)
    assert any(key.startswith("gone/") for key in listed(Storage(tmp_path)))


def test_what_holds_no_tensor_is_not_saved(tmp_path: Path) -> None:
    for nothing in (3, {}, None, {"loss": 2.5}):
        with pytest.raises(
            ts.UsageError, match=r"tensors cannot be [\s\S]*give a module or a tree"
        ):
            checkpoint.save("t", nothing, root=tmp_path)
    assert checkpoint.latest(tmp_path) is None


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ts.CheckpointError) as caught:
        checkpoint.load("t", {"w0": np.ones((50, 9)), "v": np.ones(2)}, root=tmp_path)
    assert str(caught.value).splitlines()[0] == "checkpoint.load: 5 of tensors do not fit 't'"
    assert "has shape (50, 8), not (50, 9)" in str(caught.value)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for k in (1, 2):
        checkpoint.save(f"s{k}", {"w": np.full(4, float(k)), "v": np.ones(2)}, step=k,
                        metrics={"loss": k / 2}, async_io=False, quiet=True)  # fmt: skip

    def run(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["ckpt", *words])
        assert done.exit_code == code, done.output
        return done.output

    listed = run("ls", "--verify")
    assert [line.split()[0] for line in listed.splitlines() if "whole" in line] == ["s1", "s2"]
    assert "loss 0.5" in listed and "tensors/w" in run("show", "s1")
    monkeypatch.setattr("tessera.launch.ckpt_cli.age_text", lambda created_s: "now")
    assert run("ls", "checkpoints") == run("ls", "--root", "checkpoints")
    assert run("verify") == "s2: 24 bytes are those that were saved\n"
    assert run("diff", "s1", "s2", code=1) == ("tensors/w: largest difference 1\n1 of 2 differ\n")
    assert run("diff", "s1", "s1") == "0 of 2 differ\n"
    assert run("export", "x.npz", "s1") == "x.npz: 2 tensors\n"
    assert np.load("x.npz")["w"].tolist() == [1.0] * 4
    assert "name the root" in run("ls", "s1", code=2) and "name the root" in run(
        "prune", "1", "--root", "s1", code=2
    )
    assert "it is a checkpoint itself" in run("ls", "checkpoints/s1", code=2)
    Path("weights.safetensors").touch()  # as if an example had run in this folder
    assert "write root='checkpoints'" in run("ls", ".", code=2)
    assert "write root='../" in run("verify", "--root", f"../{tmp_path.name}", code=2)
    assert "'b' and --root 'a' are two roots" in run("ls", "--root", "a", "b", code=2)
    assert "there are: loss" in run("ls", "--metric", "acc", code=2)
    assert "no checkpoint in 'checkpoints' has the metric 'acc'" in run(
        "prune", "1", "--best", "1", "--metric", "acc", code=2
    )
    assert "s1" in run("ls", "--metric", "loss")
    assert run("prune", "1") == "removed s1\n"
    assert "no checkpoint" in run("verify", "--root", "nowhere", code=2)
    (data,) = Path("checkpoints/s2").glob("*.bin")
    whole = data.read_bytes()
    assert "complete" in run("ls")
    data.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert "is damaged" in run("ls", "--verify", code=1)
    said = run("verify", code=1)
    assert f"file: {data.name}; tensor: tensors/" in said and "; reason: bytes 0 to " in said
    data.write_bytes(whole[:-1])
    assert "1 files have another size" in run("ls")
    data.unlink()
    assert "1 files are missing" in run("ls")
    run("ls", "--verify", code=1)
    assert "the file is missing" in run("verify", "s2", code=1)
    (Path("checkpoints/s2") / "manifest.json").write_text("{")
    for words in (("verify",), ("verify", "s2"), ("ls", "--verify")):
        assert "manifest" in run(*words, code=1)
    for words in (("verify", "s9"), ("verify", "../s2"), ("verify", "--no-such-option")):
        run(*words, code=2)


def test_files_have_the_mode_of_the_user(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        place = saved(tmp_path)
        modes = {p.stat().st_mode & 0o777 for p in place.iterdir()}
        assert modes == {0o600} and place.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)


def test_large_tensors_are_cut_into_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.checkpoint.pieces.FILE_BYTES", 1000)
    monkeypatch.setattr("tessera.checkpoint.pieces.READ_CACHE_BYTES", 2000)
    tree = {"a": RNG.normal(size=(100, 7)), "b": RNG.normal(size=(3, 500)), "c": np.float32(1)}
    tree = {k: np.asarray(x, np.float32) for k, x in tree.items()}
    checkpoint.save("t", tree, root=tmp_path, async_io=False, quiet=True)
    found = checkpoint.load("t", root=tmp_path)
    assert all((found.tensors[k].numpy() == tree[k]).all() for k in tree)
    sizes = [p.stat().st_size for p in (tmp_path / "t").glob("*.bin")]
    assert len(sizes) == 8 and max(sizes) < 2000 and sum(sizes) == (700 + 1500 + 1) * 4


@pytest.mark.parametrize("at", ["data", "manifest", "its end"])
def test_a_save_that_fails_leaves_no_data_on_a_full_disk(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data are deleted unless their manifest may already exist."""
    monkeypatch.setattr("tessera.checkpoint.pieces.FILE_BYTES", 1000)
    tree = {"w": RNG.normal(size=(1000,)).astype(np.float32)}
    checkpoint.save("a", tree, root=tmp_path, async_io=False, quiet=True)
    before, write = {p.name for p in (tmp_path / "a").iterdir()}, Storage.write

    def full(self: Storage, key: str, value: bytes) -> None:
        name = key.partition("/")[2]
        if name.endswith("00002.bin") if at == "data" else name == "manifest.json":
            if at == "its end":
                write(self, key, value)
            raise ts.CheckpointError("no space left")
        write(self, key, value)

    monkeypatch.setattr(Storage, "write", full)
    for tag in ("a", "b"):
        with pytest.raises(ts.CheckpointError, match="no space left"):
            checkpoint.save(tag, {"w": tree["w"] + 1}, root=tmp_path, async_io=False, quiet=True)
    there = at == "its end"
    if not there:
        assert {p.name for p in (tmp_path / "a").iterdir()} == before
        assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert checkpoint.latest(tmp_path) == ("b" if there else "a")
    assert (checkpoint.load(root=tmp_path).tensors["w"].numpy() == tree["w"] + there).all()


def test_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore's memory driver: only the driver differs from s3 and gs."""
    kept = pytest.importorskip("tensorstore").KvStore.open("memory://").result()
    monkeypatch.setattr(checkpoint.storage.Storage, "_store", kept)
    root = "memory://bucket"
    for step in (1, 2, 3):
        checkpoint.save(
            f"s{step}", {"w": np.full(4, step)}, root=root, keep=np.int64(2), quiet=True
        )
    assert checkpoint.load(root=root).tensors["w"].numpy().tolist() == [3] * 4
    assert checkpoint.verify("s2", root) and checkpoint.latest(root) == "s3"
    assert [k.decode().partition("/")[0] for k in sorted(kept.list().result())] == ["s2"] * 2 + ["s3"] * 2  # noqa: E501  # fmt: skip
    read: list[int] = []

    class Watched:
        def read(self, key: str, **how: Any) -> Any:
            found = kept.read(key, **how)
            read.append(len(found.result().value))
            return found

    ((key, size),) = checkpoint.load(root=root).manifest.files().items()
    kept.write(f"s3/{key}", b"x" * 10_000_000).result()
    monkeypatch.setattr(checkpoint.storage.Storage, "_store", Watched())
    with pytest.raises(ts.CheckpointError, match=f"it has more than {size} bytes"):
        checkpoint.load("s3", root=root)
    assert max(read) < 10_000  # the file's size is checked before memory is allocated
