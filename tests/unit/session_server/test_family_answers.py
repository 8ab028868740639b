"""Answers as each family's model writes them: reasoning, text and calls, whole and piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_models import TEMPLATES, model_text

from session_server.answers import Delta, Shown, as_message
from session_server.families import choose
from session_server.messages import Message

pytestmark = pytest.mark.timeout(120)
MARKUP = {
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>", '\n{"name": "f", "arguments": {"a": "漢"}}\n'),
    "deepseek_v31": (
        "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f<｜tool▁sep｜>{}",
        "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    ),
    "mistral": ("[THINK]", "[/THINK]", "[TOOL_CALLS]", '[{"name": "f", "arguments": {"a": "漢"}}]', "f[ARGS]{}"),
    "smollm2": ("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}'),
    "harmony": (
        "<|channel|>", "analysis", "final", "commentary to=functions.f <|constrain|>json", "<|message|>", "<|end|>",
        "<|start|>assistant", "<|call|>", "<|return|>", "{}",
    ),
}  # fmt: skip
TEXT = ("a", " ", "\n", "👩🏽‍🚀", "🏳️‍🌈", "漢字", "e\u0301", "<", "</", "<|", "[", "stop", "停", "止", "🙂")
STOPS = st.sampled_from([(), ("stop",), ("停止", "🙂🙂"), ("👩🏽‍🚀a",)])


def tell(name: str, output: list[int], steps: list[int], stops: tuple[str, ...], prompt: list[int]) -> list[Delta]:
    """All deltas of a streamed answer. What has been told is checked against the message at every step."""
    made = choose("auto", model_text(name)).format
    message = made.message(output, stops, prompt=prompt, tools=True, turn_id="turn-7")
    stream, shown, told, at = made.stream(stops, prompt=prompt, tools=True, turn_id="turn-7"), Shown(), [], 0
    for step in [*steps, len(output)]:
        at = min(len(output), at + step)
        for delta in stream.feed(output[:at]):
            told.append(shown.add(delta))
        list(shown.rest(message))  # raises for what cannot be its beginning
    told += [shown.add(delta) for delta in shown.rest(message)]
    assert as_message(told) == message
    return told


@pytest.mark.parametrize("name", MARKUP)
def test_a_message_is_the_sum_of_its_deltas(name: str) -> None:
    text = model_text(name)
    begun = text.encode("<think>") if name != "harmony" else []
    pieces = st.lists(st.sampled_from([*TEXT, *MARKUP[name]]), max_size=14).map("".join)
    steps = st.lists(st.integers(1, 4), max_size=40)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(pieces, steps, STOPS, st.booleans())
    def run(raw: str, steps: list[int], stops: tuple[str, ...], thinking: bool) -> None:
        told = tell(name, text.encode(raw), steps, stops, begun if thinking else [])
        assert not any("\ufffd" in delta.text for delta in told)
        assert not any(stop in delta.text for delta in told for stop in stops)

    run()


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_tokens_that_are_no_text_stream_as_they_are_told_whole(name: str) -> None:
    size = model_text(name).vocab_size

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, min(size, 1200)), max_size=30), st.lists(st.integers(1, 3), max_size=30))
    def run(output: list[int], steps: list[int]) -> None:
        tell(name, output, steps, (), [])

    run()


def test_a_character_is_told_when_its_last_token_has_come() -> None:
    text = model_text("qwen3")
    output = text.encode("🏳️‍🌈𒀀")
    stream = choose("auto", text).format.stream((), prompt=(), tools=False, turn_id="turn-1")
    told = ["".join(delta.text for delta in stream.feed(output[:end])) for end in range(1, len(output) + 1)]
    assert "" in told
    assert "".join(told) == "🏳️‍🌈𒀀"


def parse(name: str, raw: str, *, tools: bool = True, prompt: str = "") -> dict[str, Any]:
    text = model_text(name)
    ids = text.encode(prompt)
    return choose("auto", text).format.message(text.encode(raw), (), prompt=ids, tools=tools, turn_id="turn-7")


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def test_qwen_reasoning_text_and_several_calls() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "漢"}}\n</tool_call>'
    message = parse("qwen3", f"<think>\nWhy?\n</think>\n\nLook: \n{call}\n{call}<|im_end|>")
    assert message["reasoning_content"] == "Why?"
    assert message["content"] == "Look:"
    assert calls_of(message) == [("f", '{"a": "漢"}')] * 2
    assert [call["id"] for call in message["tool_calls"]] == ["call-7-0", "call-7-1"]


def test_what_is_malformed_is_shown_and_does_not_hide_what_is_not() -> None:
    good, bad = '<tool_call>{"name": "f", "arguments": {}}</tool_call>', '<tool_call>{"name": 1}</tool_call>'
    message = parse("qwen3", f"A {good}{bad}")
    assert message["content"] == f"A{bad}"
    assert calls_of(message) == [("f", "{}")]
    assert parse("qwen3", f"A {good[:-3]}") == {"role": "assistant", "content": f"A {good[:-3]}"}
    assert parse("qwen3", good, tools=False) == {"role": "assistant", "content": good}


def test_reasoning_that_the_prompt_began_and_the_length_cut() -> None:
    prompt = "<|im_start|>assistant\n<think>\n"
    assert parse("qwen3_thinking", "Hm, 漢", prompt=prompt) == {
        "role": "assistant", "content": "", "reasoning_content": "Hm, 漢",
    }  # fmt: skip
    again = parse("qwen3_thinking", "<think>\nHm\n</think>\n\nYes", prompt=prompt)
    assert (again["reasoning_content"], again["content"]) == ("Hm", "Yes")
    assert parse("deepseek_r1", "Yes", prompt="<｜tool▁outputs▁end｜>")["content"] == "Yes"


def test_deepseek_spellings_of_calls() -> None:
    fenced = 'function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
    wrapped = "Go.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert calls_of(parse("deepseek_r1", wrapped.format(fenced))) == [("f", '{"a": 1}')]
    message = parse("deepseek_v31", wrapped.format('f<｜tool▁sep｜>{"a": 1}'))
    assert (calls_of(message), message["content"]) == ([("f", '{"a": 1}')], "Go.")


def test_mistral_spellings_and_ids_of_calls() -> None:
    listed = parse("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcDEF123"}, {"name": "g"}]')
    assert calls_of(listed) == [("f", "{}"), ("g", "{}")]
    ids = [call["id"] for call in listed["tool_calls"]]
    assert ids[0] == "abcDEF123"
    assert len(ids[1]) == 9
    assert ids[1].isalnum()
    named = parse("mistral", 'Go. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}')
    assert (named["content"], calls_of(named)) == ("Go.", [("f", '{"a": 1}'), ("g", "{}")])


def test_harmony_channels() -> None:
    raw = (
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    message = parse("harmony", raw)
    assert (message["reasoning_content"], message["content"]) == ("Hm", "I look.")
    assert calls_of(message) == [("f", '{"a": 1}')]
    assert parse("harmony", raw.removesuffix("<|call|>"))["content"] == 'I look.\n{"a": 1}'


@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_are_no_text(name: str) -> None:
    text = model_text(name)
    end = choose("auto", text).end_id
    raw = "<|channel|>final<|message|>Yes" if name == "harmony" else "Yes"
    message = choose("auto", text).format.message([*text.encode(raw), end], (), prompt=(), tools=True, turn_id="turn-1")
    assert message == {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize("mode", ["strict", "tool_arguments"])
def test_a_client_may_leave_reasoning_out_but_not_change_it(mode: Any) -> None:
    stored = Message({"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}, mode)
    assert stored.same({"role": "assistant", "content": "Yes"})
    assert not stored.same({"role": "assistant", "content": "Yes", "reasoning_content": "Ah"})
    assert not stored.same({"role": "assistant", "content": "No"})
    assert not Message({"role": "assistant", "content": "Yes"}, mode).same(
        {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
    )
    assert json.dumps(stored.raw)
