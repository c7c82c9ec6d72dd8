"""Where do the files of checkpoints lie? In a folder, or in an object store, through TensorStore.

Its key-value drivers write a file beside, force it to the disk, rename it and force the folder's
names: a key holds all of a value or what it held before. `gs://bucket/path` and
`s3://bucket/path` have the same promise from their services.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.checks import library, unfit
from ..core.errors import CheckpointError, fail
from ..core.files import sync

_URL = re.compile(r"(gs|s3|memory|file)://")
_OS_ERROR = re.compile(r"\[?os_error_code='(\d+)'")


class Storage:
    """The values of `root`, by keys with "/". Raises CheckpointError where it cannot be used."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        if not isinstance(root, (str, os.PathLike)) or not str(root):
            raise unfit("checkpoint", "root", root, 'name a folder, or "gs://bucket/path"')
        self.name = str(root).rstrip("/") or "/"
        scheme = _URL.match(self.name)
        self.folder = None if scheme else Path(self.name)
        if scheme and scheme[1] == "file":
            self.folder = Path(self.name.removeprefix("file://"))

    @cached_property
    def _store(self) -> Any:
        kept = library("checkpoint", "tensorstore", "")
        url = self.name if self.folder is None else self.folder.absolute().as_uri()
        with self._errors("used"):
            return kept.KvStore.open(url + "/").result()

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise self._unfit(verb, why) from None
        except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
            first = str(error).splitlines()[0]
            code = _OS_ERROR.search(str(error))
            raise self._unfit(verb, os.strerror(int(code[1])) if code else first) from None

    def _unfit(self, verb: str, why: str) -> CheckpointError:
        return fail(
            CheckpointError,
            f"checkpoint: {self.name!r} cannot be {verb}: {why}",
            fix="free some space, mend the permissions, or name another root",
        )

    def make(self, tag: str) -> None:
        """The place of a checkpoint, whose name is on the disk when this returns."""
        if self.folder is not None:
            with self._errors("written"):
                (self.folder / tag).mkdir(parents=True, exist_ok=True)
                sync(self.folder)

    def write(self, key: str, value: bytes) -> None:
        """All of `value` under `key`, durable when this returns."""
        with self._errors("written"):
            self._store.write(key, value).result()

    def read(self, key: str) -> bytes | None:
        """What is under `key`; None if nothing is."""
        if self.folder is not None and not self.folder.is_dir():
            return None
        with self._errors("read"):
            found = self._store.read(key).result()
        return bytes(found.value) if found.state == "value" else None

    def listed(self) -> list[str]:
        """All keys, sorted."""
        if self.folder is not None and not self.folder.is_dir():
            return []
        with self._errors("read"):
            return sorted(k.decode(errors="replace") for k in self._store.list().result())

    def delete(self, keys: Iterable[str]) -> None:
        """Nothing is under `keys`; those that come first go first."""
        with self._errors("deleted from"):
            for key in keys:
                self._store.write(key, None).result()

    def tidy(self, tag: str) -> None:
        """An empty folder goes."""
        if self.folder is not None:
            with self._errors("deleted from"):
                try:
                    (self.folder / tag).rmdir()
                except OSError:  # something is in it, or it is gone
                    return
                sync(self.folder)


def together(jobs: Iterable[Any], workers: int = 4) -> None:
    """Runs `jobs`, a few at a time; the first error of one ends it."""
    with ThreadPoolExecutor(workers, "tessera-checkpoint") as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
