"""Rows for rollouts: exact at every index, whatever restarts between; bad files are named."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from segue.config.schema import Config, Data, Evaluation
from segue.errors import ConfigError
from session_server.dataset import Datasets, JsonLines, open_dataset


def write_rows(path: Path, count: int) -> str:
    path.write_bytes(b"".join(orjson.dumps({"id": index, "q": "zwölf"}) + b"\n" for index in range(count)))
    return str(path)


def rows_of_this_test() -> list[dict[str, object]]:
    return [{"id": index} for index in range(3)]


def no_rows() -> list[object]:
    return ["text"]


def test_an_epoch_holds_every_row_once_and_the_next_is_in_another_order(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 17)
    data = open_dataset(Data(source="jsonl", path=path), path, 5)
    assert data is not None
    epochs = [[data.row(epoch * 17 + place)["id"] for place in range(17)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_process_gives_the_same_rows_from_any_index_on(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 11)
    first, again, other = (open_dataset(Data(source="jsonl", path=path), path, seed) for seed in (5, 5, 6))
    assert first is not None
    assert again is not None
    assert other is not None
    assert [again.row(i) for i in range(30, 60)] == [first.row(i) for i in range(30, 60)]
    assert [other.row(i) for i in range(11)] != [first.row(i) for i in range(11)]


def test_without_shuffling_rows_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 4)
    data = open_dataset(Data(source="jsonl", path=path, shuffle=False), path, 0)
    assert data is not None
    assert [data.row(i)["id"] for i in range(6)] == [0, 1, 2, 3, 0, 1]


def test_evaluations_play_the_held_out_rows_from_the_first_on(tmp_path: Path) -> None:
    train, held_out = write_rows(tmp_path / "train.jsonl", 9), write_rows(tmp_path / "eval.jsonl", 5)
    config = Config(data=Data(source="jsonl", path=train, eval_path=held_out), evaluation=Evaluation(groups=3))
    rows = Datasets.open(config)
    assert [rows.row("eval", group)["id"] for group in range(6)] == [0, 1, 2, 0, 1, 2]
    assert Datasets.open(Config()).row("train", 3) == {}


def test_a_function_can_give_the_rows() -> None:
    data = open_dataset(Data(source="python", entry_point=f"{__name__}:rows_of_this_test", shuffle=False), "", 0)
    assert data is not None
    assert [data.row(i)["id"] for i in range(4)] == [0, 1, 2, 0]


def test_lines_without_an_end_or_a_content_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 0}\n\n  \n{"id": 1}')
    assert [row["id"] for row in JsonLines(path)] == [0, 1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Data(source="jsonl", path="nowhere.jsonl"), "data.path: there is no file nowhere.jsonl"),
        (Data(source="python", entry_point="json:nothing"), "data.entry_point: cannot load 'json:nothing'"),
        (Data(source="python", entry_point=f"{__name__}:no_rows"), "gave str, rows are dicts"),
        (Data(source="python", entry_point="builtins:list"), "data: there is not a single row"),
    ],
)
def test_what_gives_no_rows_is_named(data: Data, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        open_dataset(data, data.path, 0)


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 0}\n{"id": \n[1]\n')
    rows = JsonLines(path)
    with pytest.raises(ConfigError, match=r"data\.path: row 1 of .* is not JSON"):
        rows[1]
    with pytest.raises(ConfigError, match="row 2 of .* is not a JSON object"):
        rows[2]
