"""Every event ever released stays readable, and the docs table says what the classes say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from segue.events import codec
from segue.events.base import LATEST, REGISTRY, Body
from segue.testing import golden

FILES = sorted(golden.GOLDEN_DIR.glob("*.json"))


@pytest.mark.parametrize("cls", golden.classes(), ids=golden.golden_name)
def test_the_class_is_what_its_golden_file_says(cls: type[Body]) -> None:
    path = golden.GOLDEN_DIR / golden.golden_name(cls)
    assert path.exists(), f"{path.name} is missing: {golden.WRITE_COMMAND}"
    assert path.read_text() == golden.golden_text(cls), (
        f"{cls.__name__} changed: give it a new version and an upcaster, then {golden.WRITE_COMMAND}"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_recorded_bytes_decode_into_the_newest_class(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["name"] in LATEST, f"the class of {path.name} is gone, but logs hold its events"
    body = codec.decode_body(record["name"], record["version"], record["example"].encode())
    assert type(body) is LATEST[record["name"]]
    if record["version"] == body.SPEC.version:
        assert codec.encode_body(body).decode() == record["example"]
        assert body.logical_key() == record["logical_key"]
        assert body.identity_digest() == record["identity_digest"]


def test_golden_files_exist_for_every_version_and_nothing_else() -> None:
    assert {p.name for p in FILES} >= {golden.golden_name(cls) for cls in REGISTRY.values()}
    assert len(FILES) >= 50


def test_a_missing_file_is_reported_with_the_command_that_writes_it(tmp_path: Path) -> None:
    written = golden.write_missing(tmp_path)
    assert len(written) == len(REGISTRY)
    assert golden.complaints(tmp_path) == []
    (tmp_path / "turn.started.v1.json").unlink()
    assert golden.complaints(tmp_path) == [
        "turn.started.v1.json is missing: python -m segue.testing.golden --write"
    ]  # fmt: skip
    assert golden.main(["--folder", str(tmp_path)]) == 1
    assert golden.main(["--folder", str(tmp_path), "--write"]) == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"prompt_tokens": {\n            "type": "integer"', '"prompt_tokens": {\n            "type": "string"'),
        ('"key": [\n    "request_id"', '"key": [\n    "turn_id"'),
        ("turn.started|a request id", "turn.started|another"),
        ('\\"prompt_tokens\\":13', '\\"prompt_tokens\\":12'),
    ],
)
def test_a_class_that_differs_is_reported_and_its_file_never_overwritten(
    tmp_path: Path, before: str, after: str
) -> None:
    golden.write_missing(tmp_path)
    path = tmp_path / "turn.started.v1.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    [complaint] = golden.complaints(tmp_path)
    assert complaint.startswith("TurnStarted differs from turn.started.v1.json: give it version 2")
    assert golden.main(["--folder", str(tmp_path), "--write"]) == 1
    assert path.read_text() == text.replace(before, after)


def test_the_docs_table_is_current() -> None:
    assert golden.DOCS_FILE.read_text() == golden.docs_text(), f"docs/events.md is old: {golden.DOCS_COMMAND}"


def test_the_docs_table_has_a_row_for_every_event() -> None:
    rows = [line for line in golden.docs_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(LATEST)
    [row] = [r for r in rows if "<br>TurnCommitted |" in r]
    assert "| fact | session server |" in row
    assert "session_id, turn_id" in row
    assert "token_digest, logprob_digest, rows_digest" in row
    assert all(r.count(" | ") == 7 for r in rows)


def test_the_asyncapi_document_says_what_the_classes_say_and_every_reference_leads_somewhere() -> None:
    text = golden.ASYNCAPI_FILE.read_text()
    assert text == golden.asyncapi_text(), f"docs/asyncapi.json is old: {golden.DOCS_COMMAND}"
    document = json.loads(text)
    messages = document["components"]["messages"]
    assert {m["name"] for m in messages.values()} == set(LATEST)
    commands = {name for name, m in messages.items() if m["x-event"]["kind"] == "command"}
    assert set(document["channels"]["commands"]["messages"]) == commands
    assert set(document["channels"]["log"]["messages"]) == set(messages)
    for reference in set(re.findall(r'"\$ref": "#/([^"]+)"', text)):
        found = document
        for part in reference.split("/"):
            found = found[part]
        assert found
