"""An engine as a contract test sees it, and how one of each kind is started for tests."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tiny_models import TINY_LAYERS, TINY_TOP_K

from actors.engines import EngineOptions
from actors.engines.http import EngineControl
from segue.wire.engine import (
    STREAM_END,
    EventSplitter,
    GenerateAnswer,
    GenerateRequest,
    RouteShape,
    decode_answer,
    encode_request,
    error_of,
)

VOCAB = 64
START_VERSION = 5
START_DEADLINE_S = 280.0
ROUTES = RouteShape(TINY_LAYERS, TINY_TOP_K)
KINDS = ("fake", pytest.param("sglang", marks=pytest.mark.slow))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_options(kind: str, model_path: Path, log_file: Path) -> EngineOptions:
    return EngineOptions(
        model_path=model_path,
        port=free_port(),
        log_file=log_file,
        device="cpu",
        dtype="float32",
        max_total_tokens=32768,
        max_running_requests=8,
        return_routed_experts=True,
        weight_version=START_VERSION,
        extra_args=("--token-s", "0.004") if kind == "fake" else (),
    )


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine as a test sees it: its kind, its control client and a way to generate."""

    kind: str
    control: EngineControl
    http: aiohttp.ClientSession

    async def generate(self, request: GenerateRequest) -> GenerateAnswer:
        async with self._post(request) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise error_of(answer.status, body, "generate")
            return decode_answer(body, request, routes=ROUTES)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateAnswer]:
        splitter = EventSplitter()
        async with self._post(request) as answer:
            async for data in answer.content.iter_any():
                for event in splitter.feed(data):
                    if event != STREAM_END:
                        yield decode_answer(event, request, routes=ROUTES)

    def _post(self, request: GenerateRequest) -> aiohttp.client._RequestContextManager:
        headers = {"content-type": "application/json"}
        return self.http.post(self.control.url + "/generate", data=encode_request(request), headers=headers)
