"""Tables of documents, converted row by row to cached token files.

A table's column holds tokens (lists of whole numbers) or text. It is read one batch of rows at a
time, so a table may be larger than memory. The cache is keyed by a hash of the files' names, sizes
and times, and of all settings that affect the tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.checks import existing, library, one_of, unfit
from ..core.errors import BackendError, UsageError
from .sources import BYTES_END, Reading, TokenSource
from .tokenizer import Tokenizer, load

FORMAT = 1
"""Must change when tokens would be made differently."""
COLUMNS = ("input_ids", "tokens", "ids", "text", "content")
"""The column names that are tried, in this order, if none is given."""
_ROWS = 1024

Arrow = Any  # pyarrow's classes have no types


# ---- sources of rows ---------------------------------------------------------------------------
def is_dataset_folder(path: Path) -> bool:
    """Returns whether `datasets.save_to_disk` wrote this folder."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def convert_folder(path: Path, how: Reading) -> TokenSource:
    """The tokens of a folder that `datasets.save_to_disk` wrote; `how.split` names one of several
    splits ("train" unless named)."""
    if (path / "dataset_dict.json").is_file():
        splits = _json(path / "dataset_dict.json").get("splits", [])
        path = path / _split(splits, how)
    state = _json(path / "state.json")
    if state.get("_indices_data_files"):
        raise UsageError(
            f"dataloader: the rows of {str(path)!r} are chosen by an index file",
            fix="save it again: dataset.flatten_indices().save_to_disk(...)",
        )
    files = [path / str(entry.get("filename")) for entry in state.get("_data_files", [])]
    for file in files:
        existing("dataloader", file, "write the folder again with datasets.save_to_disk")
    return _converted(files, str(path), how, lambda column: _tables(files, column))


def convert_file(path: Path, how: Reading) -> TokenSource:
    """The tokens of one Parquet, Arrow or Feather file."""
    return _converted([path], str(path), how, lambda column: _tables([path], column))


def _split(splits: Sequence[str], how: Reading) -> str:
    """The name of the split to read. Raises UsageError, which names all splits, if it does not
    exist."""
    named = how.take("split")
    split: str = "train" if named is None else named
    one_of("dataloader", "data_split", split, splits)
    return split


def is_dataset(data: Any) -> bool:
    """Returns whether `data` is a `datasets.Dataset`, or a dict of them by split, such as a
    `DatasetDict`."""
    one = next(iter(data.values()), None) if isinstance(data, Mapping) else data
    return hasattr(one, "with_format") and hasattr(one, "column_names")


def convert_dataset(data: Any, how: Reading) -> TokenSource:
    """The tokens of a `datasets.Dataset`, including its selection and order, or of one split of
    several."""
    if isinstance(data, Mapping):
        data = data[_split([*data], how)]

    def rows(column: str | None) -> Iterator[Arrow]:
        name = _column("dataset", data.column_names, column)
        for table in data.select_columns([name]).with_format("arrow").iter(_ROWS):
            yield from table.column(name).chunks

    return _converted([], "dataset", how, rows, str(getattr(data, "_fingerprint", "")) or None)


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UsageError if it has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if isinstance(found, dict):
        return found
    raise UsageError(
        f"dataloader: {str(path)!r} cannot be read",
        fix="write the folder again with datasets.save_to_disk",
    )


def _tables(files: Sequence[Path], column: str | None) -> Iterator[Arrow]:
    """Yields the arrays of one column, one batch of rows at a time."""
    pa, ipc, parquet, _ = _library()
    for path in files:
        try:
            with ExitStack() as open_:
                if path.suffix == ".parquet":
                    file = open_.enter_context(parquet.ParquetFile(path, memory_map=True))
                    name = _column(str(path), file.schema_arrow.names, column)
                    for batch in file.iter_batches(_ROWS, columns=[name]):
                        yield batch.column(name)
                else:
                    mapped = open_.enter_context(pa.memory_map(str(path)))
                    for batch in _batches(pa, ipc, mapped):
                        yield batch.column(_column(str(path), batch.schema.names, column))
        except (OSError, pa.ArrowException) as error:
            first = str(error).partition("\n")[0]
            raise UsageError(
                f"dataloader: {str(path)!r} cannot be read: {first}",
                fix="is it whole, and what its name says that it is?",
            ) from None


def _batches(pa: Any, ipc: Any, mapped: Any) -> Iterator[Arrow]:
    """Yields the record batches of an Arrow file, in either of the two formats."""
    try:
        file = ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        yield from ipc.open_stream(mapped)
        return
    for i in range(file.num_record_batches):
        yield file.get_batch(i)


def _column(where: str, names: Sequence[str], wanted: str | None) -> str:
    """The column with tokens or text: the wanted one, one with a customary name, or the only
    one."""
    looked_for = COLUMNS if wanted is None else (wanted,)
    found = next((name for name in looked_for if name in names), None)
    if found is None and wanted is None and len(names) == 1:
        found = names[0]
    if found is None:
        raise UsageError(
            f"dataloader: {where!r} has no column " + " or ".join(map(repr, looked_for)),
            columns=", ".join(names),
            fix="give data_column, the name of the one that holds tokens or text",
        )
    return found


# ---- conversion to tokens ----------------------------------------------------------------------
Encode = Callable[[str], NDArray[Any]]


def _encoder(tokenizer: Any) -> tuple[Encode, int | None, str | None]:
    """(function from text to ids, end-of-document token, key for the cache: None if there is
    none)."""
    if tokenizer is None:
        return lambda text: np.frombuffer(text.encode(), np.uint8), BYTES_END, "bytes"
    if isinstance(tokenizer, (str, Path)):
        tokenizer = load(tokenizer)
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode, tokenizer.end, tokenizer.text()
    encode = getattr(tokenizer, "encode", tokenizer)
    if not callable(encode):
        raise unfit(
            "dataloader",
            "tokenizer",
            tokenizer,
            "give a function from text to ids, an object with encode(text), or the path of "
            "a saved tokenizer",
        )
    end = getattr(tokenizer, "eos_token_id", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: np.asarray(encode(text)), end, None
    return (
        lambda text: np.asarray(encode(text, add_special_tokens=False)), end, backend.to_str(),
    )  # fmt: skip


def _converted(
    files: Sequence[Path],
    name: str,
    how: Reading,
    rows: Callable[[str | None], Iterator[Arrow]],
    cache_key: str | None = "",
) -> TokenSource:
    """The tokens of `rows(column)` as mapped files, made unless they are cached."""
    _library()
    encode, end, tokenizer_known_by = _encoder(how.take("tokenizer"))
    facts = [
        FORMAT, how.take("column"), how.eos, tokenizer_known_by, cache_key,
        [(str(p.resolve()), (s := p.stat()).st_size, s.st_mtime_ns) for p in files],
    ]  # fmt: skip
    kept = None
    if tokenizer_known_by is not None and cache_key is not None:
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
        kept = Path(how.cache) / f"tokens-{digest}"
        if kept.is_dir():
            return _open(kept, name)

    def documents() -> Iterator[tuple[NDArray[Any], NDArray[Any], bool]]:
        for array in rows(how.column):
            yield _documents(array, encode, name)

    try:
        Path(how.cache).mkdir(parents=True, exist_ok=True)
        with _atomic_folder(Path(how.cache), kept) as folder:
            # If a token does not fit, it is done again with twice the width.
            widths = (np.uint16, np.uint32)
            if not any(_write(folder, documents(), how.eos, end, width) for width in widths):
                raise UsageError(
                    f"{name}: there are tokens above 2**32 - 1",
                    fix="a token is from 0 to 2**31 - 1",
                )
            if kept is None:  # deleting the folder keeps the mapped files readable
                return _open(folder, name)
    except OSError as error:
        raise BackendError(
            f"dataloader: tokens cannot be written under {str(how.cache)!r}: {error.strerror}",
            fix="give data_cache, a folder with room on a disk that can be written",
        ) from None
    return _open(kept, name)


def _documents(array: Arrow, encode: Encode, name: str) -> tuple[NDArray[Any], NDArray[Any], bool]:
    """(tokens of all rows, number of tokens of each row, True if they were text)."""
    pa, _, _, compute = _library()
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        parts = [encode(text) for text in array.to_pylist() if text is not None]
        sizes = np.array([part.size for part in parts], np.int64)
        values = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        text = True
    else:
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if not (any(is_(kind) for is_ in lists) and pa.types.is_integer(kind.value_type)):
            raise UsageError(
                f"{name}: a column of {kind} is neither tokens nor text",
                fix="give data_column, the name of a column of lists of whole numbers or strings",
            )
        array = array.drop_null()
        inner = array.flatten()
        if inner.null_count:
            raise UsageError(f"{name}: a list of tokens has gaps", fix="fill its null entries")
        values = inner.to_numpy(zero_copy_only=False)
        sizes = np.array(compute.list_value_length(array).to_numpy(zero_copy_only=False), np.int64)
        text = False
    if values.size and (values.dtype.kind not in "iu" or values.min() < 0):
        raise UsageError(
            f"{name}: {values.dtype} from {values.min()} are no tokens",
            fix="a token is a whole number from 0",
        )
    return values, sizes[sizes > 0], text


def _write(
    folder: Path,
    batches: Iterator[tuple[NDArray[Any], NDArray[Any], bool]],
    eos: int | None,
    text_end: int | None,
    dtype: type[np.unsignedinteger[Any]],
) -> bool:
    """Writes tokens.bin, ends.npy and facts.json to `folder`; returns False if a token does not fit
    `dtype`."""
    ends: list[NDArray[np.int64]] = []
    total, top, closing = 0, np.iinfo(dtype).max, eos
    with open(folder / "tokens.bin", "wb") as file:
        for values, sizes, text in batches:
            closing = text_end if text and eos is None else eos
            stops = np.cumsum(sizes)
            if closing is not None and stops.size:
                bare = values[stops - 1] != closing
                values = np.insert(values.astype(np.int64), stops[bare], closing)
                stops = stops + np.cumsum(bare)
            if values.size and int(values.max()) > top:
                return False
            file.write(values.astype(dtype).tobytes())
            ends.append(stops + total)
            total += values.size
    np.save(folder / "ends.npy", np.concatenate(ends) if ends else np.zeros(0, np.int64))
    facts = {"dtype": np.dtype(dtype).name, "eos": closing}
    (folder / "facts.json").write_text(json.dumps(facts))
    return True


def _open(folder: Path, name: str) -> TokenSource:
    facts = _json(folder / "facts.json")
    file = folder / "tokens.bin"
    if not file.stat().st_size:
        return TokenSource([], None, facts["eos"], name)
    tokens = np.memmap(file, facts["dtype"], mode="r")
    return TokenSource([tokens], np.load(folder / "ends.npy"), facts["eos"], name)


@contextmanager
def _atomic_folder(parent: Path, target: Path | None) -> Iterator[Path]:
    """A new folder, renamed to `target` once it is complete; with None it is removed at the end."""
    part = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
    try:
        yield part
        if target is not None:
            os.chmod(part, 0o755)
            try:
                part.rename(target)
            except OSError:
                if not target.is_dir():  # if it exists, another process was faster
                    raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _library() -> tuple[Any, Any, Any, Any]:
    parts = ("pyarrow", "pyarrow.ipc", "pyarrow.parquet", "pyarrow.compute")
    pyarrow, ipc, parquet, compute = (library("dataloader", part, "data") for part in parts)
    return pyarrow, ipc, parquet, compute
