"""Storage of checkpoint files: a folder, or an object store through TensorStore.

A key has a whole value, either the new one or the previous one. In a folder a value is written to a
temporary file, synced and renamed, and the folder is synced. (TensorStore's file driver reuses a
lock file that a killed process left: a value shorter than that file keeps its end. So folders are
handled here.) `gs://bucket/path` and `s3://bucket/path` have the guarantees of their services.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..core.checks import library, unfit
from ..core.errors import CheckpointError
from ..core.files import sync, write_whole

T = TypeVar("T")
_STORES = ("gs", "s3", "memory")
# A request without an answer fails after two minutes: TensorStore's default is longer.
_TRY = {"max_retries": 10, "initial_delay": "1s", "max_delay": "16s"}
_TRIES = {"s3_request_retries": _TRY, "gcs_request_retries": _TRY}
# TensorStore's messages for bytes after the end; the second is that of some servers.
_BEYOND = ("OUT_OF_RANGE", "Content-Range")


class Storage:
    """The values of `root`, by keys with "/". Raises CheckpointError if it cannot be used."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        if not isinstance(root, (str, os.PathLike)) or not str(root):
            raise unfit("checkpoint", "root", root, 'name a folder, or "gs://bucket/path"')
        self.name = str(root).removeprefix("file://").rstrip("/") or "/"
        scheme, mark, _ = self.name.partition("://")
        if mark and scheme not in _STORES:
            fix = 'name a folder, "gs://bucket/path" or "s3://bucket/path"'
            raise unfit("checkpoint", "root", root, fix)
        # Absolute, because the program may change its folder before a thread writes.
        self.folder = None if mark else Path(os.path.expanduser(self.name)).absolute()

    @cached_property
    def _store(self) -> Any:
        kept = library("checkpoint", "tensorstore", "cloud")
        where: Any = self.name + "/"
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if self.name.startswith("s3://") and endpoint:  # TensorStore does not read them
            bucket, _, path = where.removeprefix("s3://").partition("/")
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            where = {
                "driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint,
                "aws_region": region or "us-east-1",
            }  # fmt: skip
        with self._errors("used"):
            return kept.KvStore.open(where, context=kept.Context(_TRIES)).result()

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unfit(verb, error.strerror or str(error)) from None
        # TensorStore's statuses come as any of these.
        except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
            raise self._unfit(verb, str(error).splitlines()[0]) from None

    def _unfit(self, verb: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint: {self.name!r} cannot be {verb}: {why}",
            fix="free some space, mend the permissions, or name another root",
        )

    def make(self, tag: str) -> None:
        """Creates the folder of a checkpoint; its name is on disk when this returns."""
        if self.folder is not None:
            with self._errors("written"):
                (self.folder / tag).mkdir(parents=True, exist_ok=True)
                sync(self.folder)

    @contextmanager
    def held(self, tag: str) -> Iterator[None]:
        """Keeps other processes from writing to the folder of `tag`. Raises CheckpointError if one
        writes now. (Object stores cannot be locked.)"""
        if self.folder is None:
            yield
            return
        with self._errors("written"):
            handle = os.open(self.folder / tag, os.O_RDONLY)
        try:
            with suppress(OSError):  # there are file systems without locks
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    fix = "give each run a root of its own, or end the other one"
                    what = f"checkpoint: another process writes {tag!r} in {self.name!r}"
                    raise CheckpointError(what, fix=fix) from None
            yield
        finally:
            with suppress(OSError):  # a process that was forked meanwhile has the handle, too
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def write(self, key: str, value: bytes) -> None:
        """Writes `value` under `key`; it is durable when this returns."""
        with self._errors("written"):
            if self.folder is not None:
                write_whole(self.folder / key, value)
            else:
                self._store.write(key, value).result()

    def read(self, key: str, most: int | None = None) -> bytes | None:
        """The value under `key`, None if there is none. A value larger than `most` bytes is cut
        after `most` + 1, so that memory is bounded."""
        with self._errors("read"):
            if self.folder is not None:
                path = self.folder / key
                try:
                    if (
                        path.exists() and not path.is_file()
                    ):  # a pipe is waited for, a device has no end
                        return None
                    with open(path, "rb") as file:
                        size = os.fstat(file.fileno()).st_size  # `read` allocates its argument
                        return file.read(min(size, size if most is None else most) + 1)
                except (FileNotFoundError, NotADirectoryError):
                    return None
            longer = most is not None and self._byte(key, most) is not None
            part = {"byte_range": slice(0, most + 1)} if most is not None and longer else {}
            found = self._store.read(key, **part).result()
        return bytes(found.value) if found.state == "value" else None

    def size(self, key: str) -> int | None:
        """The number of bytes under `key`; None if there is no value, and for object stores."""
        if self.folder is not None:
            with self._errors("read"), suppress(FileNotFoundError, NotADirectoryError):
                return (self.folder / key).stat().st_size
        return None

    def _byte(self, key: str, at: int) -> bytes | None:
        """One byte of an object, None after its end: a cheap test of its size."""
        try:
            found = self._store.read(key, byte_range=slice(at, at + 1)).result()
        except (ValueError, IndexError) as error:
            if any(word in str(error) for word in _BEYOND):
                return None
            raise
        return bytes(found.value) if found.state == "value" else None

    def listed(self) -> list[str]:
        """All keys, sorted."""
        with self._errors("read"):
            if self.folder is not None:
                found = (p for each in _within(self.folder) for p in _within(each) if p.is_file())
                return sorted(p.relative_to(self.folder).as_posix() for p in found)
            return sorted(k.decode(errors="replace") for k in self._store.list().result())

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes `keys`, in order."""
        with self._errors("deleted from"):
            for key in keys:
                if self.folder is not None:
                    path = self.folder / key
                    with suppress(FileNotFoundError):  # another process may remove it, too
                        path.unlink()
                        sync(path.parent)
                else:
                    self._store.write(key, None).result()

    def tidy(self, tag: str) -> None:
        """Removes the folder of `tag`, if it has only temporary files of a killed process."""
        if self.folder is None:
            return
        with self._errors("deleted from"), suppress(FileNotFoundError):
            for part in (self.folder / tag).glob(".*.part-*"):
                part.unlink()
            if not any((self.folder / tag).iterdir()):
                (self.folder / tag).rmdir()
                sync(self.folder)


def _within(folder: Path) -> list[Path]:
    """The content of `folder`; empty if it is no folder or was just removed."""
    try:
        return [*folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def together(jobs: Iterable[Callable[[], object]], workers: int = 4) -> None:
    """Runs `jobs`, a few at a time; raises the first error."""
    with ThreadPoolExecutor(workers, "tessera-checkpoint") as pool:
        for done in [begun(pool, job) for job in jobs]:
            done.result()


def begun(pool: ThreadPoolExecutor, job: Callable[[], T]) -> Future[T]:
    """A future of `job`, started in a thread of `pool`. When a program ends its pools refuse new
    jobs: then `job` is done before this returns."""
    try:
        return pool.submit(job)
    except RuntimeError:
        done = Future[T]()
        try:
            done.set_result(job())
        except Exception as error:
            done.set_exception(error)
        return done
