"""An engine that answers at once with canned bytes of the right shape, and the router's two routes.

One process, a bare protocol without an HTTP library: its own cost per request must be small beside that of whatever
stands in front of it. It speaks SGLang's `/generate` and OpenAI's chat completions, both with the log-probs of as many
tokens as were asked for, and gives route rows for [start, prompt + output - 1) where a request wants them.

    python benchmarks/rig/engine.py --model DIR --layers 48 --top-k 8   (prints its URL)
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

ROW_CHUNK = 4096


class Canned:
    """Answers by number of output tokens."""

    def __init__(self, model: Path, layers: int, top_k: int) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.end_id = self.tokenizer.token_to_id("<|im_end|>")
        self._row_bytes = layers * top_k * 4
        assert self._row_bytes % 3 == 0, "rows are cut out of one base64 text"
        rows = np.random.default_rng(0).integers(0, 128, (ROW_CHUNK, layers * top_k), np.int32)
        self.rows_sent = 0
        self._rows = base64.b64encode(rows.astype("<i4").tobytes())

    @functools.cache  # noqa: B019  one object for the whole process
    def output_ids(self, count: int) -> list[int]:
        plain = self.tokenizer.encode(prose(count), add_special_tokens=False).ids
        return [*plain[: count - 1], self.end_id]

    @functools.cache  # noqa: B019
    def text(self, count: int) -> str:
        return str(self.tokenizer.decode(self.output_ids(count)))

    @functools.cache  # noqa: B019
    def _generated(self, count: int) -> bytes:
        """Everything of a /generate answer behind the request's own id."""
        ids, values = self.output_ids(count), logprobs(count)
        meta = {
            "finish_reason": {"type": "stop", "matched": self.end_id}, "completion_tokens": count, "cached_tokens": 0,
            "weight_version": "0", "e2e_latency": 0.1,
            "output_token_logprobs": [[value, i, None] for value, i in zip(values, ids, strict=True)],
        }  # fmt: skip
        outer = {"text": self.text(count), "output_ids": ids}
        return (json.dumps(outer)[:-1] + ', "meta_info": ' + json.dumps(meta)[:-1]).encode()

    @functools.cache  # noqa: B019
    def _chat(self, count: int) -> bytes:
        content = []
        for value, i in zip(logprobs(count), self.output_ids(count), strict=True):
            token = self.tokenizer.decode([i], skip_special_tokens=False)
            content.append({"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []})
        choice = {
            "index": 0, "message": {"role": "assistant", "content": self.text(count)}, "finish_reason": "stop",
            "logprobs": {"content": content},
        }  # fmt: skip
        usage = {"prompt_tokens": 64, "completion_tokens": count, "total_tokens": 64 + count}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return json.dumps({**answer, "usage": usage}).encode()

    def generate(self, body: bytes) -> bytes:
        count = number(body, b'"max_new_tokens":')
        at = body.index(b'"rid":') + 6
        rid = body[at : body.index(b",", at)]
        ids = body.index(b'"input_ids":')
        prompt = body.count(b",", ids, body.index(b"]", ids)) + 1
        parts = [self._generated(count), b', "id": ', rid, b', "prompt_tokens": %d' % prompt]
        if b'"return_routed_experts":' in body:
            start = number(body, b'"routed_experts_start_len":', 0)
            parts += [b', "routed_experts": "', *self._routes(prompt + count - 1 - start), b'"']
        return b"".join([*parts, b"}}"])

    def _routes(self, rows: int) -> list[bytes]:
        size = self._row_bytes // 3 * 4
        self.rows_sent += rows
        whole, rest = divmod(rows, ROW_CHUNK)
        return [self._rows] * whole + [self._rows[: rest * size]]

    def chat(self, body: bytes) -> bytes:
        whole = number(body, b'"max_tokens":', 0) or number(body, b'"max_completion_tokens":')
        return self._chat(whole)


def prose(words: int, seed: int = 0) -> str:
    """Text of at least so many tokens."""
    vocabulary = "the of and to in is that for it as was with be by on not he his but at are this have from or had an"
    return " ".join(random.Random(seed).choices(vocabulary.split(), k=words + 8))


def logprobs(count: int) -> list[float]:
    """As engines print them: float32 values widened to doubles."""
    values = np.random.default_rng(1).exponential(0.7, count).astype(np.float32)
    return [-float(value) for value in values]


def number(body: bytes, field: bytes, default: int | None = None) -> int:
    at = body.find(field)
    if at < 0:
        assert default is not None, field
        return default
    at += len(field)
    end = at
    while end < len(body) and body[end : end + 1] in b" 0123456789":
        end += 1
    return int(body[at:end])


class Protocol(asyncio.Protocol):
    def __init__(self, canned: Canned, url: list[str]) -> None:
        self._canned, self._url, self._data = canned, url, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._data[:end])
            if head.startswith(b"PRI "):  # a router that tries HTTP/2 first
                self._refuse()
                return
            at = head.lower().find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + size:
                return
            body = bytes(self._data[end + 4 : end + 4 + size])
            del self._data[: end + 4 + size]
            self._answer(head, body)

    def _refuse(self) -> None:
        self._transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self._transport.close()

    def _answer(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if method == b"POST" and path == b"/generate":
            answer = self._canned.generate(body)
        elif method == b"POST" and path == b"/v1/chat/completions":
            answer = self._canned.chat(body)
        elif path == b"/rows":
            answer = b"%d" % self._canned.rows_sent
        elif path == b"/assign":
            answer = json.dumps({"engine_id": "e", "incarnation": "1", "url": self._url[0], "version": 0}).encode()
        else:
            answer = b'{"status": "ok", "model_path": "m", "version": "0"}'
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer
        )


async def serve(canned: Canned) -> None:
    url: list[str] = []
    server = await asyncio.get_running_loop().create_server(lambda: Protocol(canned, url), "127.0.0.1", 0, backlog=1024)
    url.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print(url[0], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--top-k", type=int, default=8)
    options = parser.parse_args()
    asyncio.run(serve(Canned(options.model, options.layers, options.top_k)))


if __name__ == "__main__":
    main()
