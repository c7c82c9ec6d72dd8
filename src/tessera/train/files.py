"""Files of a run, with retries: a failed write is reported in one line, and tried again at the end.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as there:
...     blocked = Path(there, "file"); _ = blocked.write_text("")
...     files = Files(blocked / "run", Path(there, "spare"), print)
...     files.write("sample.txt", b"text")
...     files.finish()  # doctest: +ELLIPSIS
run: sample.txt cannot be written to ...file/run: Not a directory; tried again at the end
run: sample.txt is in ...spare
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..core.files import write_whole

Tell = Callable[[str], None]


class Files:
    """The files of `folder`, each written whole or not at all; at the end `spare` gets the files
    that failed."""

    def __init__(self, folder: Path, spare: Path | None, tell: Tell) -> None:
        self.folder, self.spare, self.tell = folder, spare, tell
        self.ended = False
        self._late: dict[str, bytes] = {}

    def write(self, name: str, data: bytes) -> None:
        """Writes a file now; if that fails, again at the end."""
        known = name in self._late
        self._late[name] = data
        error = self._put(name, self.folder)
        if error is None:
            return
        if self.ended:
            self._at_last(name, error)
        elif not known:
            self.tell(_line(name, self.folder, error) + "; tried again at the end")

    def finish(self) -> None:
        """Tries failed files once more; from now on a failed file goes to `spare`."""
        self.ended = True
        for name in list(self._late):
            error = self._put(name, self.folder)
            if error is not None:
                self._at_last(name, error)

    def place(self, name: str) -> Path | None:
        """The path of a file; None if it was not written."""
        folders = [self.folder] if self.spare is None else [self.folder, self.spare]
        there = (folder / name for folder in folders if name not in self._late)
        return next((path for path in there if path.is_file()), None)

    def _at_last(self, name: str, error: OSError) -> None:
        """Tries the spare folder for a failed file, and reports that it is there or lost."""
        if self.spare is None:
            self.tell(
                _line(name, self.folder, error) + ", and is lost; spare= names a second folder"
            )
            return
        again = self._put(name, self.spare)
        if again is None:
            self.tell(f"run: {name} is in {self.spare}")
        else:
            both = f"{self.folder} ({error.strerror}) nor to {self.spare} ({again.strerror})"
            self.tell(f"run: {name} can be written neither to {both}, and is lost")

    def _put(self, name: str, folder: Path) -> OSError | None:
        try:
            write_whole(folder / name, self._late[name])
        except OSError as error:
            return error
        del self._late[name]
        return None


def _line(name: str, folder: Path, error: OSError) -> str:
    return f"run: {name} cannot be written to {folder}: {error.strerror}"
