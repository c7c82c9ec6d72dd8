"""Token sources: files, folders and tables read as one sequence of tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.core.errors import BackendError, UsageError
from tessera.data import tokenize_rows as tables
from tessera.data import tokenizer
from tessera.data.corpus import collect
from tessera.data.sources import BYTES_END, Reading, TokenSource, open_source


def first_line(caught: pytest.ExceptionInfo[UsageError]) -> str:
    return str(caught.value).splitlines()[0]


# ---- sources -----------------------------------------------------------------------------------
def tokens_of(source: TokenSource) -> list[int]:
    row = np.empty(source.size, np.int32)
    source.read(0, row)
    found: list[int] = row.tolist()
    return found


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=6), st.data())
def test_pieces_read_as_one_row(parts: list[list[int]], data: st.DataObject) -> None:
    source = TokenSource([np.array(p, np.uint32) for p in parts])
    whole = [token for part in parts for token in part]
    assert tokens_of(source) == whole
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert tokens_of(source.part(start, stop)) == whole[start:stop]


def test_token_files_are_mapped_and_folders_are_read_by_name(tmp_path: Path) -> None:
    np.arange(10, 16, dtype=np.uint32).tofile(tmp_path / "b.bin")
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    np.save(tmp_path / "c.npy", np.arange(16, 20))
    (tmp_path / "notes.txt").write_text("not tokens")
    how = Reading(dtype="uint32")
    source = open_source(str(tmp_path), how)
    assert tokens_of(source) == list(range(20))
    assert all(isinstance(piece, np.memmap) for piece in source.pieces)
    assert repr(source) == f"TokenSource('{tmp_path}', 20 tokens)"
    listed = open_source([tmp_path / "c.npy", str(tmp_path / "a.npy")], how)
    assert tokens_of(listed) == [*range(16, 20), *range(10)]
    assert tokens_of(open_source(np.arange(3), how)) == [0, 1, 2]


def test_the_standard_library_as_bytes() -> None:
    source = open_source(None, Reading())
    again = open_source(None, Reading())
    assert source.fingerprint() == again.fingerprint()
    ends = source.document_ends()
    row = np.empty(int(ends[0]), np.int32)
    source.read(0, row)
    assert row[-1] == BYTES_END == source.eos
    assert bytes(row[:-1].astype(np.uint8)).decode() == collect().train[0].text
    assert ends.size == len(collect().train) + len(collect().val)


def bad_sources(p: Path) -> dict[str, tuple[object, Reading]]:
    np.save(p / "wide.npy", np.zeros((2, 2)))
    (p / "torn.npy").write_bytes(b"\x93NUMPY")
    (p / "odd.bin").write_bytes(b"abc")
    (p / "void.bin").write_bytes(b"")
    (p / "text.txt").write_text("x")
    (p / "empty").mkdir()
    np.save(p / "minus.npy", np.array([1, -1]))
    return {
        "dataloader: '{p}/absent' does not exist": (p / "absent", Reading()),
        "{p}/wide.npy: tokens cannot be float64 of shape (2, 2)": (p / "wide.npy", Reading()),
        "dataloader: '{p}/torn.npy' is not a .npy file that can be mapped": (
            p / "torn.npy", Reading(),
        ),
        "dataloader: '{p}/odd.bin' does not say the dtype of its tokens": (
            p / "odd.bin", Reading(),
        ),
        "dataloader: '{p}/odd.bin' has 3 bytes, no whole number of uint16": (
            p / "odd.bin", Reading(dtype="uint16"),
        ),
        "{p}/void.bin: there are no tokens": (p / "void.bin", Reading(dtype="uint16")),
        "dataloader: '{p}/text.txt' is of no kind that is known": (p / "text.txt", Reading()),
        "dataloader: '{p}/empty' holds no file of tokens": (p / "empty", Reading()),
        "dataloader: data cannot be 17": (17, Reading()),
        "dataloader: data cannot be [None]": ([None], Reading()),
        "tokens: `ends` does not grow up to the number of tokens, 3": (
            lambda: TokenSource([np.arange(3)], np.array([2])), Reading(),
        ),
        "tokens: tokens cannot be [1, [2]]": (lambda: TokenSource([[1, [2]]]), Reading()),  # type: ignore[list-item]
        "tokens, ends: tokens cannot be 'x'": (
            lambda: TokenSource([np.arange(3)], "x"), Reading(),  # type: ignore[arg-type]
        ),
        "TokenSource: pieces cannot be 3": (lambda: TokenSource(3), Reading()),  # type: ignore[arg-type]
        "{p}/minus.npy: tokens from -1 to 1 near place 0": (
            lambda: tokens_of(open_source(p / "minus.npy", Reading())), Reading(),
        ),
    }  # fmt: skip


def test_bad_sources(tmp_path: Path) -> None:
    for text, (data, how) in bad_sources(tmp_path).items():
        with pytest.raises(UsageError) as caught:
            data() if callable(data) else open_source(data, how)
        assert first_line(caught).startswith(text.format(p=tmp_path))
        assert "  fix" in str(caught.value)


# ---- tables ------------------------------------------------------------------------------------
DOCUMENTS = [[5, 6, 7], [], [8], [9, 0], [10, 11]]


def write_table(path: Path, column: str, values: list[object], kind: str, groups: int = 2) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather, ipc, parquet

    table = pa.table({"id": list(range(len(values))), column: values})
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=groups)
    elif kind == "feather":
        feather.write_feather(table, path)
    else:
        with ipc.new_stream(path, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=groups):
                writer.write_batch(batch)
    return path


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
def test_a_column_of_tokens(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path / f"t.{kind}", "tokens", [*DOCUMENTS, None], kind)  # type: ignore[list-item]
    how = Reading(cache=tmp_path / "kept", eos=0)
    source = open_source(path, how)
    assert tokens_of(source) == [5, 6, 7, 0, 8, 0, 9, 0, 10, 11, 0]
    assert source.document_ends().tolist() == [4, 6, 8, 11]
    assert source.eos == 0
    assert isinstance(source.pieces[0], np.memmap)
    plain = open_source(path, Reading(cache=tmp_path / "kept"))
    assert tokens_of(plain) == [5, 6, 7, 8, 9, 0, 10, 11]
    assert plain.document_ends().tolist() == [3, 4, 6, 8]


def test_text_becomes_bytes_or_what_the_tokenizer_says(tmp_path: Path) -> None:
    texts = ["def f(x):\n", "return é"]
    path = write_table(tmp_path / "t.parquet", "text", list(texts), "parquet")

    def read(how: object) -> list[int]:
        return tokens_of(open_source(path, Reading(tokenizer=how, cache=tmp_path / "kept")))

    assert read(None) == [*texts[0].encode(), BYTES_END, *texts[1].encode(), BYTES_END]
    tok = tokenizer.train(texts, vocab=300)
    want = tok.encode_documents(texts).tolist()
    assert read(tok) == want
    tok.save(tmp_path / "tok.json")
    assert read(str(tmp_path / "tok.json")) == want
    assert read(lambda text: [len(text), 70_000]) == [10, 70_000, 8, 70_000]
    with pytest.raises(UsageError) as caught:
        read(17)
    assert first_line(caught) == "dataloader: tokenizer cannot be 17"


def test_what_was_made_is_kept_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "t.parquet", "tokens", list(DOCUMENTS), "parquet")
    how = Reading(cache=tmp_path / "kept")
    reads: list[object] = []
    real = tables._tables
    monkeypatch.setattr(tables, "_tables", lambda f, c: reads.append(f) or real(f, c))
    for _ in range(3):
        open_source(path, how)
    assert len(reads) == 1
    open_source(path, Reading(cache=tmp_path / "kept", eos=3))
    assert len(reads) == 2
    write_table(path, "tokens", [[1, 2]], "parquet")
    assert tokens_of(open_source(path, how)) == [1, 2]
    # Two functions cannot be told apart, so the results of a function are not cached.
    write_table(path, "text", ["a"], "parquet")
    kept = sorted((tmp_path / "kept").iterdir())
    assert tokens_of(open_source(path, Reading(tokenizer=lambda t: [4], cache=how.cache))) == [4]
    assert tokens_of(open_source(path, Reading(tokenizer=lambda t: [5], cache=how.cache))) == [5]
    assert sorted((tmp_path / "kept").iterdir()) == kept


def test_a_table_is_read_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [[i] * 3 for i in range(5000)]
    path = write_table(tmp_path / "t.parquet", "tokens", list(values), "parquet", groups=500)
    sizes: list[int] = []
    real = tables._documents
    monkeypatch.setattr(tables, "_documents", lambda a, *r: sizes.append(len(a)) or real(a, *r))
    source = open_source(path, Reading(cache=tmp_path))
    assert max(sizes) <= 1024
    assert sum(sizes) == 5000
    assert tokens_of(source) == [i for i in range(5000) for _ in range(3)]


def test_lists_of_every_kind_nulls_and_slices(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for kind in (pa.list_(pa.int16()), pa.large_list(pa.uint32()), pa.list_(pa.int64(), 2)):
        array = pa.array([[9, 9], [1, 2], None, [3, 4]], kind)
        path = tmp_path / "t.parquet"
        parquet.write_table(pa.table({"only": array.slice(1)}), path)
        source = open_source(path, Reading(cache=tmp_path))
        assert tokens_of(source) == [1, 2, 3, 4]
        assert source.document_ends().tolist() == [2, 4]
    parquet.write_table(pa.table({"only": pa.array([None, "ab", ""], pa.large_string())}), path)
    assert tokens_of(open_source(path, Reading(cache=tmp_path))) == [97, 98, BYTES_END]


def test_a_huggingface_tokenizer_is_known_by_its_json(tmp_path: Path) -> None:
    """A tokenizer with a Rust backend, as made by `transformers`; others are plain functions."""
    path = write_table(tmp_path / "t.parquet", "text", ["a", "bb"], "parquet")

    class Backend:
        def to_str(self) -> str:
            return "{}"

    class Fast:
        eos_token_id = 2
        backend_tokenizer = Backend()

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + [5] * len(text)

    how = Reading(tokenizer=Fast(), cache=tmp_path / "kept")
    assert tokens_of(open_source(path, how)) == [5, 2, 5, 5, 2]
    assert len(list((tmp_path / "kept").iterdir())) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.parquet", "text", ["a"], "parquet")
    with pytest.raises(BackendError) as caught:
        open_source(path, Reading(cache=path / "below"))
    assert str(caught.value).startswith(
        f"dataloader: tokens cannot be written under '{path}/below': "
    )


def test_tokens_that_do_not_fit_two_bytes_take_four(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.arrow", "ids", [[1, 2], [70_000]], "arrow", groups=1)
    source = open_source(path, Reading(cache=tmp_path))
    assert source.pieces[0].dtype == np.uint32
    assert tokens_of(source) == [1, 2, 70_000]


def test_a_folder_of_the_datasets_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "two")
    how = Reading(cache=tmp_path / "kept")
    flat = [token for document in DOCUMENTS for token in document]
    assert tokens_of(open_source(tmp_path / "one", how)) == flat
    assert tokens_of(open_source(tmp_path / "two", how)) == flat
    test = Reading(cache=tmp_path / "kept", split="test")
    assert tokens_of(open_source(tmp_path / "two", test)) == DOCUMENTS[0]
    with pytest.raises(UsageError) as caught:
        open_source(tmp_path / "two", Reading(split="valid"))
    assert str(caught.value).endswith("use train, test")
    # In memory, with a selection, so without a file to cache for.
    assert tokens_of(open_source(data.select([3, 0]), how)) == [9, 0, 5, 6, 7]
    splits = datasets.DatasetDict(train=data, test=data.select([0]))
    assert tokens_of(open_source(splits, how)) == flat
    assert tokens_of(open_source(splits, test)) == DOCUMENTS[0]
    with pytest.raises(UsageError) as caught:
        open_source(datasets.DatasetDict(test=data), how)
    assert first_line(caught) == "dataloader: data_split cannot be 'train'"
    assert str(caught.value).endswith("use test")
    # Files of other versions.
    state = json.loads((tmp_path / "one" / "state.json").read_text())
    (tmp_path / "one" / "state.json").write_text(json.dumps(state | {"_indices_data_files": [1]}))
    with pytest.raises(UsageError) as caught:
        open_source(tmp_path / "one", how)
    assert "chosen by an index file" in first_line(caught)
    gone = {"_data_files": [{"filename": "gone.arrow"}]}
    (tmp_path / "one" / "state.json").write_text(json.dumps(gone))
    with pytest.raises(UsageError) as caught:
        open_source(tmp_path / "one", how)
    assert first_line(caught) == f"dataloader: '{tmp_path}/one/gone.arrow' does not exist"
    (tmp_path / "one" / "state.json").write_text("[")
    with pytest.raises(UsageError) as caught:
        open_source(tmp_path / "one", how)
    assert "cannot be read" in first_line(caught)


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("x", [1.5], "t.parquet: a column of double is neither tokens nor text"),
        ("x", [[1, None]], "t.parquet: a list of tokens has gaps"),
        ("x", [[1, -7]], "t.parquet: int64 from -7 are no tokens"),
        ("x", [[2**40]], "t.parquet: there are tokens above 2**32 - 1"),
        ("y", [[1]], "has no column 'x'"),
    ],
)
def test_bad_tables(tmp_path: Path, column: str, values: list[object], text: str) -> None:
    path = write_table(tmp_path / "t.parquet", column, values, "parquet")
    with pytest.raises(UsageError) as caught:
        open_source(path, Reading(column="x", cache=tmp_path / "kept"))
    assert first_line(caught).endswith(text)
    assert list((tmp_path / "kept").iterdir()) == []  # no partial file remains


def test_tables_that_are_none_and_a_library_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "t.parquet", "y", [[1]], "parquet")
    with pytest.raises(UsageError) as caught:
        open_source(path, Reading(cache=tmp_path))
    assert first_line(caught) == (
        f"dataloader: '{path}' has no column 'input_ids' or 'tokens' or 'ids' or 'text' or "
        "'content'"
    )
    assert "columns : id, y" in str(caught.value)
    for name in ("torn.parquet", "torn.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 and nothing more")
        with pytest.raises(UsageError) as caught:
            open_source(tmp_path / name, Reading(cache=tmp_path))
        assert first_line(caught).startswith(f"dataloader: '{tmp_path}/{name}' cannot be read: ")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError) as caught:
        open_source(path, Reading(cache=tmp_path))
    assert "pip install 'tessera-spmd[data]'" in str(caught.value)
