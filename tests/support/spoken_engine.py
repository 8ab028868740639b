"""A model that spells byte by byte and shows tools, and an engine that says what a test tells it to say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 2
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nCall with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- set call = call.function %}
{{- '\\n' if loop.index0 or m.content }}{{ '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (loop.first and m.role == 'system') %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def write_spelling_model(folder: Path) -> Path:
    """A model folder without weights: one token a byte, ChatML with tools in the common JSON form."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([*SPECIAL, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"vocab_size": len(SPECIAL) + len(alphabet), "eos_token_id": END}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class SpokenEngine:
    """Says `texts` one after the other, the last of them again and again. `pace_s`: time of one token in a stream."""

    tokenizer: Tokenizer
    texts: list[str]
    pace_s: float = 0.0
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    streams: int = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        ids, finish = self._ids(text, body["sampling_params"])
        if not body.get("stream"):
            return web.json_response(_answer(body, ids, finish))
        response = web.StreamResponse()
        await response.prepare(request)
        for end in range(1, len(ids)):
            await response.write(b"data: " + json.dumps(_answer(body, ids[:end], None)).encode() + b"\n\n")
            await asyncio.sleep(self.pace_s)
        await response.write(b"data: " + json.dumps(_answer(body, ids, finish)).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    def _ids(self, text: str, sampling: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        stops = [(text.find(stop) + len(stop), stop) for stop in sampling.get("stop", ()) if stop in text]
        if stops:
            end, stop = min(stops)
            ids, finish = self.tokenizer.encode(text[:end]).ids, {"type": "stop", "matched": stop}
        else:
            ids, finish = [*self.tokenizer.encode(text).ids, END], {"type": "stop", "matched": END}
        if len(ids) > sampling["max_new_tokens"]:
            length = sampling["max_new_tokens"]
            return ids[:length], {"type": "length", "length": length}
        return ids, finish

    async def abort(self, request: web.Request) -> web.Response:
        return web.Response()


def _answer(body: dict[str, Any], ids: list[int], finish: dict[str, Any] | None) -> dict[str, Any]:
    meta = {
        "id": body["rid"], "finish_reason": finish, "completion_tokens": len(ids), "weight_version": "0",
        "prompt_tokens": len(body["input_ids"]),
        "output_token_logprobs": [[-0.5 - index / 64, token, None] for index, token in enumerate(ids)],
    }  # fmt: skip
    return {"text": "", "output_ids": ids, "meta_info": meta}


@contextlib.asynccontextmanager
async def spoken_engine(model: Path, *texts: str, pace_s: float = 0.0) -> AsyncIterator[SpokenEngine]:
    engine = SpokenEngine(Tokenizer.from_file(str(model / "tokenizer.json")), list(texts), pace_s)
    app = web.Application(client_max_size=2**28)
    app.add_routes([web.post("/generate", engine.generate), web.post("/abort_request", engine.abort)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()
