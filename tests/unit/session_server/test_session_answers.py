"""From output tokens to messages: stop strings over seams, deltas, tool calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_server_rig import VOCABULARY, write_model

from session_server.answers import Shown, TextStream, stop_over_seam
from session_server.families.generic import marked_format
from session_server.families.markup import Marks, read_json_call
from session_server.model_text import ModelText

IDS = [index for word, index in VOCABULARY.items() if word.startswith("w")]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(write_model(tmp_path_factory.mktemp("words")))


def ids(words: ModelText, text: str) -> list[int]:
    return words.encode(text)


def test_a_stop_string_over_the_seam_is_found_where_it_ends(words):
    output = ids(words, "w1 w2 w3 w4 w5")
    assert stop_over_seam(words, output, 2, ("w2 w3",)) == 3
    assert stop_over_seam(words, output, 3, ("w2 w3 w4 w5",)) == 5
    assert stop_over_seam(words, output, 2, ("w9",)) is None
    assert stop_over_seam(words, output, 0, ("w1",)) is None


@given(
    st.lists(st.sampled_from(IDS), max_size=30),
    st.lists(st.integers(1, 5), max_size=30),
    st.sampled_from(["", "w7 w8"]),
)
def test_deltas_add_up_to_the_text_and_never_show_a_stop(words, output, steps, stop):
    stops = (stop,) if stop else ()
    made = marked_format(words, Marks(read_json_call))
    whole = made.message(output, stops, prompt=(), tools=False, turn_id="turn-1")
    stream, shown, at = made.stream(stops, prompt=(), tools=False, turn_id="turn-1"), Shown(), 0
    for step in steps:
        at = min(len(output), at + step)
        for delta in stream.feed(output[:at]):
            shown.add(delta)
        assert whole["content"].startswith(shown.content)
    for delta in shown.rest(whole):
        shown.add(delta)
    assert shown.content == whole["content"]


def test_deltas_of_another_answer_are_not_patched_over(words):
    shown = Shown(content=TextStream(words, ()).feed(ids(words, "w1 w2")))
    with pytest.raises(ValueError, match="anew"):
        list(shown.rest({"content": "w3"}))


class Spelled(ModelText):
    """A tokenizer for texts: one id is one character."""

    def __init__(self) -> None:
        self.special_ids = frozenset()

    def token_id(self, token: str) -> None:
        return None

    def decode(self, ids, *, skip_special: bool = True, keep: frozenset[int] = frozenset()) -> str:
        return "".join(map(chr, ids))


def message(text: str, *, tools: bool = True):
    made = marked_format(Spelled(), Marks(read_json_call))
    return made.message([ord(c) for c in text], (), prompt=(), tools=tools, turn_id="turn-1")


def test_tool_calls_are_parsed_where_tools_were_offered():
    text = 'Look. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    raw = message(text)
    assert raw["content"] == "Look."
    assert json.loads(raw["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert message(text, tools=False) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("broken", ["<tool_call>{}</tool_call>", "<tool_call>{</tool_call>", "<tool_call>"])
def test_malformed_calls_stay_text(broken):
    assert message(broken) == {"role": "assistant", "content": broken}
