"""A session proxy as they are commonly written: FastAPI, httpx, the standard library's json, one process.

Each turn renders the whole history with the model's tokenizer, sends its token ids to the engine, and keeps the full
record: request, token ids, the engine's whole answer. Fair: keep-alive on both sides, no access log, no pydantic
models on the hot path, a fast tokenizer, uvicorn's own choice of loop and parser (uvloop and httptools if they are
installed), one client for all requests with enough connections.

    python benchmarks/rivals/fastapi_proxy.py --engine URL --model DIR --port P [--r3]
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from tokenizers import Tokenizer


def make_app(engine: str, model: Path, r3: bool) -> FastAPI:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    records: dict[str, list[dict[str, Any]]] = {}
    clients: list[httpx.AsyncClient] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=1024)
        async with httpx.AsyncClient(base_url=engine, limits=limits, timeout=600) as client:
            clients.append(client)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/healthz")
    async def health() -> Response:
        return Response()

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def chat(session_id: str, request: Request) -> Response:
        body = json.loads(await request.body())
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in body["messages"])
        input_ids = tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids
        asked: dict[str, Any] = {
            "rid": uuid.uuid4().hex, "input_ids": input_ids, "return_logprob": True,
            "sampling_params": {"max_new_tokens": body["max_tokens"], "temperature": 1.0},
        }  # fmt: skip
        if r3:
            asked["return_routed_experts"] = True
        answer = (
            await clients[0].post(
                "/generate", content=json.dumps(asked).encode(), headers={"Content-Type": "application/json"}
            )
        ).content
        data = json.loads(answer)
        output_ids, meta = data["output_ids"], data["meta_info"]
        records.setdefault(session_id, []).append(
            {
                "timestamp": time.time(), "request": {**body, "input_ids": input_ids}, "response": data,
                "output_ids": output_ids, "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
            }
        )  # fmt: skip
        content = tokenizer.decode(output_ids)
        choice = {
            "index": 0, "message": {"role": "assistant", "content": content},
            "finish_reason": meta["finish_reason"]["type"],
        }  # fmt: skip
        usage = {"prompt_tokens": len(input_ids), "completion_tokens": len(output_ids)}
        told = {
            "id": asked["rid"], "object": "chat.completion", "created": int(time.time()), "model": body["model"],
            "choices": [choice], "usage": usage,
        }  # fmt: skip
        return Response(json.dumps(told).encode(), media_type="application/json")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--r3", action="store_true")
    options = parser.parse_args()
    app = make_app(options.engine, options.model, options.r3)
    uvicorn.run(app, host="127.0.0.1", port=options.port, access_log=False, log_level="warning")
