"""Every family on a published vocabulary and its template: what is stored stays, what is added is the template's own.

The judge is the template itself: it renders the whole conversation with a stand-in for each answer, the answers are put
in as they were generated, and the whole is tokenised at once.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_models import FAMILY, TEMPLATES, model_text

from segue.errors import ConfigError, RequestError
from session_server.families import FAMILIES, choose
from session_server.families.generic import Generic
from session_server.messages import Message
from session_server.model_text import ModelText

ChatMessage = dict[str, Any]
pytestmark = pytest.mark.timeout(120)
PIECES = (
    "a", "Z", " ", "  ", "\n", "\n\n", "\t", "é", "e\u0301", "\u0301", "漢字", "ｶﾞ", "👩🏽‍🚀", "🏳️‍🌈", "\u200d", "ß", "٣",
    "<", "|>", "</", "[", '{"a": 1}', "'", "\\n", "I", "'ll", "123", "\ufeff", "🙂", "한글", "\r\n", "://",
)  # fmt: skip
"""What tokenizers treat specially at the borders of texts."""
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
SAID = st.tuples(st.sampled_from(["Yes", "漢", "🙂", "é"]), TEXTS).map(lambda two: (two[0] + two[1]).rstrip() + ".")
"""Answers: tokens that a model generates never join with the prompt's, so these do not begin with white space."""
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "ключ"]), st.one_of(st.integers(-9, 9), TEXTS), max_size=2)

SPELLED = ARGUMENTS.map(lambda found: json.dumps(found, ensure_ascii=False)).filter(
    lambda text: unicodedata.is_normalized("NFC", text)
)
"""As a model would generate it: a tokenizer that normalises would otherwise join an escape with the mark after it."""


@dataclass(frozen=True)
class Talk:
    """What a template permits, and how its model spells reasoning and calls."""

    spell: Callable[[Sequence[ChatMessage]], str]
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    reasons: bool = True
    several: bool = True
    system_later: bool = False
    system_first: bool = True
    tools: bool = False
    most_calls: int = 2
    shows_calls: bool = False
    """The template is shown the calls, not a stand-in."""


def hermes(calls: Sequence[ChatMessage]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{c["function"]["name"]}", "arguments": {c["function"]["arguments"]}}}\n</tool_call>'
        for c in calls
    )


def bars(calls: Sequence[ChatMessage]) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>{c['function']['name']}<｜tool▁sep｜>{c['function']['arguments']}<｜tool▁call▁end｜>"
        for c in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(parts) + "<｜tool▁calls▁end｜>"


def fenced(calls: Sequence[ChatMessage]) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c['function']['name']}\n```json\n{c['function']['arguments']}\n```"
        "<｜tool▁call▁end｜>"
        for c in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def listed(calls: Sequence[ChatMessage]) -> str:
    parts = [
        f'{{"name": "{c["function"]["name"]}", "arguments": {c["function"]["arguments"]}, "id": "{c["id"]}"}}'
        for c in calls
    ]
    return "[TOOL_CALLS][" + ", ".join(parts) + "]"


def addressed(calls: Sequence[ChatMessage]) -> str:
    (call,) = calls
    function = call["function"]
    return f" to=functions.{function['name']}<|channel|>commentary json<|message|>{function['arguments']}"


TALKS = {
    "qwen25": Talk(hermes, system_later=True, tools=True),
    "qwen3": Talk(hermes, system_later=True, tools=True),
    "qwen3_thinking": Talk(hermes, system_later=True, tools=True),
    "deepseek_v31": Talk(bars),
    "deepseek_r1": Talk(fenced),
    "mistral": Talk(listed, reasons=False, several=False, system_first=False, shows_calls=True),
    "smollm2": Talk(hermes, system_later=True),
    "harmony": Talk(
        addressed, ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"), tools=True, most_calls=1,
        shows_calls=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    reasoning: str
    content: str
    calls: tuple[ChatMessage, ...]
    ended: bool


@st.composite
def conversations(
    draw: st.DrawFn, talk: Talk
) -> tuple[list[ChatMessage], list[tuple[Answer, list[ChatMessage]]], bool]:
    """Opening messages; turns, each an answer and what follows it; whether tools are offered."""
    user = TEXTS.map(lambda content: {"role": "user", "content": content})
    opening = [draw(user)]
    if talk.system_first and draw(st.booleans()):
        opening.insert(0, {"role": "system", "content": draw(TEXTS)})
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        calls: list[ChatMessage] = []
        if draw(st.booleans()):
            for _ in range(draw(st.integers(1, talk.most_calls))):
                function = {"name": "look", "arguments": draw(SPELLED)}
                call_id = f"call{len(turns)}{len(calls)}abc"
                calls.append({"id": call_id, "type": "function", "function": function})
        reasoning = draw(SAID) if talk.reasons and draw(st.booleans()) and not (calls and talk.shows_calls) else ""
        follow: list[ChatMessage] = [
            {"role": "tool", "tool_call_id": call["id"], "content": draw(TEXTS)} for call in calls
        ]
        if not calls or (talk.several and draw(st.booleans())):
            follow += draw(st.lists(user, min_size=1, max_size=2 if talk.several else 1))
        if talk.system_later and draw(st.booleans()):
            follow.insert(len(calls), {"role": "system", "content": draw(TEXTS)})
        content = "" if calls and (talk.shows_calls or draw(st.booleans())) else draw(SAID)
        turns.append((Answer(reasoning, content, tuple(calls), draw(st.booleans())), follow))
    return opening, turns, talk.tools and draw(st.booleans())


def spelled(name: str, answer: Answer, thinking: bool) -> tuple[str, str]:
    """The answer as its model writes it, and the token that ends it. thinking: the prompt has opened the reasoning."""
    talk = TALKS[name]
    open_, close = talk.think
    raw = ""
    if answer.reasoning or thinking:
        raw = ("" if thinking else open_) + (answer.reasoning or "Hm.") + close
    if name == "harmony":
        if answer.calls:
            return raw + talk.spell(answer.calls), "<|call|>"
        return f"{raw}<|channel|>final<|message|>{answer.content}", "<|return|>"
    raw += answer.content
    if answer.calls:
        raw += ("\n" if answer.content else "") + talk.spell(answer.calls)
    return raw, ""


def check(name: str, opening: list[ChatMessage], turns, offered: bool) -> None:
    text = model_text(name)
    family = choose("auto", text)
    tools = TOOLS if offered else None
    ids = family.opening(opening, tools)
    shown, put_in = [*opening], {}
    for number, (answer, follow) in enumerate(turns):
        thinking = text.decode(ids[-3:], skip_special=False).endswith("<think>\n")
        raw, end = spelled(name, answer, thinking)
        output = text.encode(raw)
        if answer.ended or name == "harmony":  # whose history keeps the token that ended the answer
            output.append(text.token_id(end) if end else family.end_id)
        message = family.format.message(output, (), prompt=ids, tools=True, turn_id=f"turn-{number}")
        check_message(message, answer, "Hm." if thinking else "")
        ids_of = {
            meant["id"]: call["id"] for call, meant in zip(message.get("tool_calls", ()), answer.calls, strict=True)
        }
        follow = [{**m, "tool_call_id": ids_of[m["tool_call_id"]]} if m["role"] == "tool" else m for m in follow]
        before = [*ids, *output]
        ids = [*before, *family.appended(before[-1], message, follow, tools)]
        assert ids[: len(before)] == before
        if answer.calls and TALKS[name].shows_calls:
            shown += [{"role": "assistant", "content": "", "tool_calls": list(answer.calls)}, *follow]
        else:
            stand_in = f"PH{number}qq"
            found = f"<|channel|>final<|message|>{stand_in}<|end|>" if name == "harmony" else stand_in
            put_in[found] = ("<think>\n" if thinking else "") + raw + end
            shown += [{"role": "assistant", "content": stand_in}, *follow]
    whole = text.render(family.shown(shown), tools, prompt=True)
    for stand_in, raw in put_in.items():
        assert whole.count(stand_in) == 1
        whole = whole.replace(stand_in, raw)
    assert ids == text.encode(whole)
    assert 0 <= min(ids) <= max(ids) < text.vocab_size


def check_message(message: ChatMessage, answer: Answer, thought: str) -> None:
    """Parsed as meant; and what a client sends back, spelled its own way, is the stored message."""
    assert nfc(message.get("reasoning_content", "")) == nfc(answer.reasoning or thought)
    assert nfc(message["content"]) == nfc(answer.content)
    calls = message.get("tool_calls", [])
    assert [c["function"]["name"] for c in calls] == [c["function"]["name"] for c in answer.calls]
    for found, meant in zip(calls, answer.calls, strict=True):
        assert json.loads(nfc(found["function"]["arguments"])) == json.loads(nfc(meant["function"]["arguments"]))
    assert len({call["id"] for call in calls}) == len(calls)
    back = json.loads(json.dumps(message))
    for call in back.get("tool_calls", ()):
        call["index"] = 0
    assert Message(message, "strict").same({**back, "content": back["content"] or None})
    for call in back.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    assert Message(message, "tool_arguments").same(back)


def nfc(text: str) -> str:
    """As Qwen's tokenizer normalises."""
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_appending_gives_the_tokens_of_the_whole_conversation(name: str) -> None:
    family = choose("auto", model_text(name))
    assert (family.name, family.proved) == (FAMILY[name], True)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(conversations(TALKS[name]))
    def run(conversation) -> None:
        check(name, *conversation)

    run()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_family_takes_no_model_of_another(name: str) -> None:
    for other, factory in FAMILIES.items():
        if other not in (FAMILY[name], "generic") and (other, FAMILY[name]) != ("chatml", "qwen"):
            with pytest.raises(ConfigError):
                factory(model_text(name))


@pytest.mark.parametrize("name", ["deepseek_v31", "deepseek_r1", "mistral"])
def test_a_system_message_that_belongs_to_the_beginning_is_refused_later(name: str) -> None:
    family = choose("auto", model_text(name))
    with pytest.raises(RequestError) as error:
        family.appended(family.end_id or 0, None, [{"role": "system", "content": "b"}, user("c")], None)
    assert (error.value.status, error.value.param) == (400, "messages")


def test_roles_that_must_alternate_are_refused_when_they_do_not() -> None:
    family = choose("auto", model_text("mistral"))
    with pytest.raises(RequestError, match="alternate"):
        family.appended(2, None, [user("a"), user("b")], None)


def test_mistral_shows_its_tools_once() -> None:
    text = model_text("mistral")
    family = choose("auto", text)
    opening = family.opening([user("a")], TOOLS)
    later = family.appended(2, {"role": "assistant", "content": "b"}, [user("c")], TOOLS)
    mark = text.token_id("[AVAILABLE_TOOLS]")
    assert (opening.count(mark), later.count(mark)) == (1, 0)
    assert text.decode(later, skip_special=False) == "[INST]c[/INST]"


def test_an_answer_that_a_stop_string_cut_is_closed_first() -> None:
    text = model_text("qwen3")
    family = choose("auto", text)
    output = text.encode("漢字 stop")
    message = family.format.message(output, (" stop",), prompt=(), tools=False, turn_id="turn-1")
    assert message["content"] == "漢字"
    added = family.appended(output[-1], message, [user("é")], None)
    assert text.decode(added, skip_special=False) == (
        "<|im_end|>\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"
    )


def test_harmony_goes_on_after_each_of_its_end_tokens() -> None:
    text = model_text("harmony")
    family = choose("auto", text)
    asked = "<|start|>user<|message|>b<|end|><|start|>assistant"
    for mark, closing in (("<|return|>", ""), ("<|call|>", ""), ("<|end|>", ""), ("Yes", "<|end|>")):
        added = family.appended(text.encode(mark)[-1], None, [user("b")], None)
        assert text.decode(added, skip_special=False) == closing + asked
    with pytest.raises(RequestError, match="answers no call"):
        family.appended(0, None, [{"role": "tool", "tool_call_id": "x", "content": "1"}], None)


TRIMS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COUNTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{{ 'x' if loop.index > 3 and m['role'] == 'user' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DROPS = (
    "{% for m in messages %}{% if m['role'] != 'user' or loop.index < 3 %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "why"),
    [(TRIMS, "changes the contents"), (COUNTS, "later in a conversation"), (DROPS, "each message once")],
)
def test_a_template_for_which_the_proof_fails_is_only_best_effort(template: str, why: str) -> None:
    text = other_template("qwen3", template)
    with pytest.raises(ConfigError, match=why):
        FAMILIES["chatml"](text)
    family = choose("auto", text)
    assert (family.name, family.proved) == ("generic", False)


def test_a_tokenizer_that_joins_over_borders_is_not_proved() -> None:
    class Joining(ModelText):
        def encode(self, text: str, veil: str = "") -> list[int]:
            return super().encode(text.replace("<|im_end|>\n<|im_start|>", "<|im_end|> <|im_start|>"), veil)

    text = model_text("qwen3")
    joining = Joining.__new__(Joining)
    joining.__dict__.update(text.__dict__)
    assert choose("chatml", joining).proved  # the border inside a frame is the frame's own
    with pytest.raises(ConfigError, match="joins text"):
        FAMILIES["chatml"](seam_joining(text))


def seam_joining(text: ModelText) -> ModelText:
    """A tokenizer with one token for an answer's last letter and the end token."""

    class Joining(ModelText):
        def encode(self, text: str, veil: str = "") -> list[int]:
            return super().encode(text.replace("2<|im_end|>", "<|box_end|>"), veil)

    joining = Joining.__new__(Joining)
    joining.__dict__.update(text.__dict__)
    return joining


def other_template(name: str, template: str) -> ModelText:
    text = model_text(name)
    other = ModelText.__new__(ModelText)
    other.__dict__.update(text.__dict__)
    other.use_template(template)
    return other


def user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


@pytest.mark.parametrize("name", ["qwen3", "qwen25", "deepseek_v31"])
def test_the_generic_family_follows_templates_that_take_reasoning_out(name: str) -> None:
    """Best effort, yet the same tokens where the difference of texts shows them."""
    text = model_text(name)
    family, proved = Generic(text), choose("auto", text)
    for messages in ([user("b")], [user("b"), user("c\n")]):
        assert family.appended(7, None, messages, None) == proved.appended(7, None, messages, None)
