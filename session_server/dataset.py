"""Rows that rollouts play: `index` of a group -> a row, the same whoever asks and however often a server restarts.

No cursor is kept anywhere: the group numbers of the log are the cursor. Index i of a data set of n rows is row
i mod n of epoch i div n, in the order of a permutation that the run's seed and the epoch determine.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from segue.config.schema import Config, Data
from segue.errors import ConfigError

Row = dict[str, Any]


class Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


class Dataset:
    """`row(index)` for any index >= 0. `rows` is read in any order."""

    def __init__(self, rows: Rows, *, shuffle: bool, seed: int) -> None:
        if len(rows) == 0:
            raise ConfigError("data: there is not a single row")
        self._rows, self._shuffle, self._seed = rows, shuffle, seed

    def row(self, index: int) -> Row:
        epoch, place = divmod(index, len(self._rows))
        return self._rows[int(_order(self._seed, epoch, len(self._rows))[place]) if self._shuffle else place]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)


@dataclass(frozen=True, slots=True)
class Datasets:
    """The rows of training, and the held-out ones, which every evaluation plays from the first on."""

    train: Dataset | None
    held_out: Dataset | None
    evaluation_groups: int

    @classmethod
    def open(cls, config: Config) -> Datasets:
        data, seed = config.data, config.run.seed
        held_out = msgspec.structs.replace(data, shuffle=False) if data.eval_path else Data()
        return cls(
            open_dataset(data, data.path, seed), open_dataset(held_out, data.eval_path, seed), config.evaluation.groups
        )

    def row(self, purpose: str, group: int) -> Row:
        """What a rollout of this group plays; {} where there are no rows."""
        if purpose == "train":
            return self.train.row(group) if self.train is not None else {}
        return self.held_out.row(group % max(1, self.evaluation_groups)) if self.held_out is not None else {}


def open_dataset(data: Data, path: str, seed: int) -> Dataset | None:
    """The data set that `[data]` describes, over `path` where it names a file; None without a source.

    Raises ConfigError naming the key: no such file, a line that is no JSON object, an entry point that gives no rows.
    """
    match data.source:
        case "none":
            return None
        case "jsonl":
            rows: Rows = JsonLines(_file(path))
        case "parquet":
            rows = _parquet(_file(path))
        case "python":
            rows = _from_entry_point(data.entry_point)
    return Dataset(rows, shuffle=data.shuffle, seed=seed)


def _file(path: str) -> Path:
    found = Path(path)
    if not found.is_file():
        raise ConfigError(f"data.path: there is no file {path}")
    return found


class JsonLines(Sequence[Row]):
    """One JSON object a line; the file is mapped, and only where its lines begin is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._data: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if _size(path) else b""
        self._starts = list(self._lines())

    def _lines(self) -> Iterator[tuple[int, int]]:
        start = 0
        while start < len(self._data):
            end = self._data.find(b"\n", start)
            end = len(self._data) if end < 0 else end
            if self._data[start:end].strip():
                yield start, end
            start = end + 1

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        start, end = self._starts[index]
        try:
            row = orjson.loads(self._data[start:end])
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"data.path: row {index} of {self._path} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"data.path: row {index} of {self._path} is not a JSON object")
        return row


def _size(path: Path) -> int:
    return path.stat().st_size


def _parquet(path: Path) -> Rows:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        message = 'data.source = "parquet" needs pyarrow: install it, or convert the file to JSON lines'
        raise ConfigError(message) from error
    return cast(Rows, parquet.read_table(path).to_pylist())


def _from_entry_point(entry_point: str) -> Rows:
    module, _, name = entry_point.partition(":")
    try:
        make: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"data.entry_point: cannot load {entry_point!r} (module:function): {error}") from error
    made = make()
    rows = made if isinstance(made, Sequence) else list(made)
    wrong = next((row for row in rows if not isinstance(row, dict)), None)
    if wrong is not None:
        raise ConfigError(f"data.entry_point: {entry_point} gave {type(wrong).__name__}, rows are dicts")
    return rows
