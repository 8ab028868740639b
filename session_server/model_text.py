"""A model folder as text: its tokenizer, its chat template and the limits of its vocabulary. No torch, no transformers.

Invariant: ids that leave `encode` are below the model's vocabulary, or it raises: an id beyond it kills an engine.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from segue.errors import ConfigError, RequestError
from session_server.shield import Shield, any_of

EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Hidden layers, experts chosen per token and experts per layer of a mixture-of-experts model."""

    layers: int
    top_k: int
    experts: int


class ModelText:
    """Tokenizer and chat template of the model in `folder`. Raises ConfigError for what is missing or malformed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._config = _read_json(folder / "config.json")
        settings = _read_json(folder / "tokenizer_config.json")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model.path: {path} is missing; the session server needs a fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = {token.content: i for i, token in added.items()}
        self._added_pattern = re.compile(f"({any_of(list(self._added)).pattern})")
        self._special_texts = tuple(token.content for token in added.values() if token.special)
        self.vocab_size = int(self._text_config().get("vocab_size", self._tokenizer.get_vocab_size()))
        self.use_template(_template_text(folder, settings))
        self._specials = {
            name: _token_text(settings[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if settings.get(name) is not None
        }

    def use_template(self, template: str) -> None:
        """Render by `template` from now on. Raises ConfigError if it is none."""
        self.template_text = template
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ConfigError(f"model.path: the chat template of {self.folder} is malformed: {error}") from error

    def _text_config(self) -> dict[str, Any]:
        nested = self._config.get("text_config")
        return {**self._config, **nested} if isinstance(nested, dict) else self._config

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the model's own settings name them."""
        ids: list[int] = []
        named = self._text_config().get("eos_token_id")
        ids += [int(i) for i in (named if isinstance(named, list) else [named]) if i is not None]
        eos = self._specials.get("eos_token")
        if eos is not None and (eos_id := self._tokenizer.token_to_id(eos)) is not None:
            ids.append(eos_id)
        return tuple(dict.fromkeys(ids))

    def route_shape(self, layers: int = -1) -> RouteShape:
        """Shape of the model's route rows; `layers` overrides the config's. Raises ConfigError for a dense model."""
        config = self._text_config()
        experts = next((int(config[key]) for key in EXPERT_COUNT_KEYS if config.get(key)), 0)
        top_k = int(config.get("num_experts_per_tok") or 0)
        if not experts or not top_k:
            raise ConfigError(
                f"r3.enabled: {self.folder / 'config.json'} names no experts; set r3.enabled = false for a dense model"
            )
        return RouteShape(int(config["num_hidden_layers"]) if layers < 0 else layers, top_k, experts)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def shield(self, control: Sequence[str] = ()) -> Shield:
        """Veils special tokens, and those of `control`, in client text."""
        return Shield(any_of([*self._special_texts, *(token for token in control if token in self._added)]))

    def encode(self, text: str, veil: str = "") -> list[int]:
        """Ids of `text`, special tokens in it parsed, none added. Raises RequestError 400 beyond the vocabulary.

        veil: stands in what is not parsed though it spells a token (see `shield`); it is taken out.
        """
        ids = self._unveiled(text, veil) if veil else self._tokenizer.encode(text, add_special_tokens=False).ids
        if ids:
            self.check_ids(ids, "messages")
        return ids

    def _unveiled(self, text: str, veil: str) -> list[int]:
        ids: list[int] = []
        for piece in self._added_pattern.split(text):
            if piece in self._added:
                ids.append(self._added[piece])
            elif veil in piece:
                ids += self._encode_plain(piece.replace(veil, ""))
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """As `encode`, with no token but those of the tokenizer's model."""
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        split = tokenizer.pre_tokenizer
        words = [word for word, _ in split.pre_tokenize_str(text)] if split is not None else [text]
        return [token.id for word in words for token in tokenizer.model.tokenize(word)]

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise RequestError 400 if one of `ids` is not in the model's vocabulary."""
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            message = f"token id {bad} is outside the model's vocabulary of {self.vocab_size}"
            raise RequestError(400, "invalid_request_error", message, param)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, keep: frozenset[int] = frozenset()) -> str:
        """Text of `ids`, without special tokens but those in `keep`."""
        if not keep:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special)
        dropped = self.special_ids - keep if skip_special else frozenset[int]()
        return self._tokenizer.decode([i for i in ids if i not in dropped], skip_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None, *, prompt: bool) -> str:
        """The chat template's text; `prompt` adds the beginning of an answer. RequestError 400 if it refuses."""
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self._specials)
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise RequestError(400, "invalid_request_error", message, "messages") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"model.path: {path} is missing") from error
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {path} is not a JSON object")
    return found


def _template_text(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((item["template"] for item in template if item.get("name") == "default"), None)
    if not isinstance(template, str):
        raise ConfigError(f"model.path: {folder} has no chat template (chat_template.jinja or tokenizer_config.json)")
    return template


def _token_text(value: object) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _environment() -> jinja2.Environment:
    """Jinja as model folders expect it: sandboxed, with the few names that published templates use."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)
