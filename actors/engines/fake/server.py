"""The fake engine's HTTP server: SGLang's routes, bodies and status codes over the fake scheduler.

Where the real engine would die (an id outside the vocabulary, a release while something runs, a resume of what was
never released, an unreadable weight payload) this one answers 400 and lives.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import uuid
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import orjson
from aiohttp import web

from actors.engines.fake import weights
from actors.engines.fake.model import FakeModel, mix
from actors.engines.fake.scheduler import PAUSE_MODES, Request, Sampling, Scheduler

TAGS = ("weights", "kv_cache", "cuda_graph")
BODY_LIMIT_BYTES = 1 << 32
FORCED_OUTPUT_EVERY = 50
"""The scheduler hands on the tokens of an answer that is not streamed in portions of this size; what an abort in the
queue returns is what had been handed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """How a fake engine behaves. token_s: seconds a step takes. vary_by_rid: at temperature > 0 and without a
    sampling_seed, two requests with one prompt answer differently, as a real engine's would."""

    model_path: Path
    model: FakeModel = field(default_factory=FakeModel)
    host: str = "127.0.0.1"
    port: int = 0
    version: int = 0
    token_s: float = 0.0
    return_routed_experts: bool = True
    context_length: int = 4096
    max_running_requests: int = 64
    max_total_tokens: int = 65536
    vary_by_rid: bool = False


class FakeEngine:
    """`async with FakeEngine(options) as engine:` serves at `engine.url` until the block ends."""

    def __init__(self, options: FakeOptions) -> None:
        self.options = options
        self.weights = weights.from_folder(options.model_path) if _has_weights(options.model_path) else {}
        self.released: set[str] = set()
        self.updating = False
        self.scheduler = Scheduler(
            options.model,
            version=options.version,
            token_s=options.token_s,
            max_running=options.max_running_requests,
            max_cached_tokens=options.max_total_tokens,
            text_of=_decoder(options.model_path),
        )
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.options.host, self.options.port).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.get("/health", self.health),
                web.get("/health_generate", self.health_generate),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.route("*", "/flush_cache", self.flush_cache),
                web.post("/abort_request", self.abort_request),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.post("/release_memory_occupation", self.release),
                web.post("/resume_memory_occupation", self.onload),
                web.post("/begin_weight_update", self.begin),
                web.post("/end_weight_update", self.end),
                web.post("/update_weights_from_tensor", self.load_tensors),
                web.post("/update_weights_from_disk", self.load_disk),
                web.post("/update_weight_version", self.set_version),
                web.post("/weights_checker", self.check_weights),
            ]
        )
        return app

    # --- generation -------------------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """POST /generate."""
        body = await _body(http)
        try:
            request = self._admit(body)
        except ValueError as error:
            return _error(str(error))
        if body.get("stream"):
            return await self._stream(http, body, request)
        async with aclosing(self.scheduler.steps(request)) as steps:
            async for _ in steps:
                pass
        return _json(self._answer(body, request))

    async def _stream(self, http: web.Request, body: dict[str, Any], request: Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        async with aclosing(self.scheduler.steps(request)) as steps:
            async for _ in steps:
                if request.finish is None:
                    await response.write(b"data: " + orjson.dumps(self._answer(body, request)) + b"\n\n")
        await response.write(b"data: " + orjson.dumps(self._answer(body, request)) + b"\n\ndata: [DONE]\n\n")
        return response

    def _admit(self, body: dict[str, Any]) -> Request:
        ids, model = body["input_ids"], self.options.model
        if not ids or not all(isinstance(token, int) and 0 <= token < model.vocab_size for token in ids):
            raise ValueError(f"input_ids must be one or more ids in [0, {model.vocab_size})")
        rid = body.get("rid") or uuid.uuid4().hex
        if rid in self.scheduler.requests:
            raise ValueError(f"Duplicate request ID detected: {rid}")
        sampling = _sampling(body.get("sampling_params") or {})
        if len(ids) + sampling.max_new_tokens > self.options.context_length:
            raise ValueError(f"{len(ids)} + {sampling.max_new_tokens} tokens exceed {self.options.context_length}")
        if sampling.stop and self.scheduler.text_of is None:
            raise ValueError("stop strings need a tokenizer.json in the model folder")
        if not 0 <= body.get("routed_experts_start_len", 0) <= len(ids):
            raise ValueError(f"routed_experts_start_len must be in [0, {len(ids)}]")
        if body.get("return_sampling_mask") and sampling.temperature > 0 and sampling.top_k < 1:
            raise ValueError("return_sampling_mask needs a finite top_k or temperature 0")
        if self.released:
            raise ValueError(f"memory is released: {sorted(self.released)}")
        states = [model.state_of([ids[0]])]
        for token in ids[1:]:
            states.append(mix(states[-1], token))
        return Request(
            rid=rid,
            prompt_tokens=len(ids),
            context=list(ids),
            sampling=sampling,
            states=states,
            salt=self._salt(rid, sampling),
            cache_key=model.state_of((body.get("extra_key") or "").encode()),
        )

    def _salt(self, rid: str, sampling: Sampling) -> int:
        if sampling.temperature == 0:
            return 0
        if sampling.sampling_seed is not None:
            return mix(1, sampling.sampling_seed)
        return self.options.model.state_of(rid.encode()) if self.options.vary_by_rid else 0

    def _answer(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        in_queue = request.finish is not None and request.finish["type"] == "abort" and not request.has_routes
        shown = len(request.versions)
        if in_queue and not body.get("stream"):
            shown -= shown % FORCED_OUTPUT_EVERY
        outputs, versions, model = request.output_ids[:shown], request.versions[:shown], self.options.model
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "completion_tokens": shown,
            "weight_version": str(self.scheduler.version),
            "weight_versions": _spans(versions),
        }
        if body.get("return_logprob"):
            places = enumerate(zip(outputs, versions, strict=True), request.prompt_tokens)
            meta["output_token_logprobs"] = [[model.logprob(t, at, version), t, None] for at, (t, version) in places]
        if in_queue:
            return {"text": request.text, "output_ids": outputs, "meta_info": meta}
        meta |= {
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached or 0,
            "num_retractions": request.retractions,
        }
        if request.finish is not None and body.get("return_routed_experts") and self.options.return_routed_experts:
            start, fed = body.get("routed_experts_start_len", 0), len(request.fed)
            rows = model.rows(request.context[start:fed], range(start, fed), request.fed[start:])
            meta["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode("ascii")
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = request.kept
            meta["output_token_sampling_logprobs"] = [-float(np.log(len(kept))) for kept in request.kept]
        return {"text": request.text, "output_ids": outputs, "meta_info": meta}

    # --- state ------------------------------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        """200 as long as the process serves."""
        return web.Response()

    async def health_generate(self, http: web.Request) -> web.Response:
        """503 while paused."""
        return web.Response(status=503 if self.scheduler.paused else 200)

    async def model_info(self, http: web.Request) -> web.Response:
        """Model folder and weight version."""
        return _json({"model_path": str(self.options.model_path), "weight_version": str(self.scheduler.version)})

    async def server_info(self, http: web.Request) -> web.Response:
        """Sizes and switches."""
        return _json(
            {
                "version": "fake",
                "max_total_num_tokens": self.options.max_total_tokens,
                "enable_return_routed_experts": self.options.return_routed_experts,
            }
        )

    async def flush_cache(self, http: web.Request) -> web.Response:
        """At once without ?timeout=; with it, waits that long until nothing runs or waits, and a paused queue waits."""
        patience_s = float(http.query.get("timeout", "0"))
        if patience_s > 0:
            try:
                async with asyncio.timeout(patience_s):
                    await self.scheduler.until_empty()
            except TimeoutError:
                return _error("Timed out waiting for idle state.")
        if not self.scheduler.flush():
            return web.Response(status=400, text="Flush cache failed.\n")
        return web.Response(text="Cache flushed.\n")

    async def abort_request(self, http: web.Request) -> web.Response:
        """Always 200, whether or not anything matched."""
        body = await _body(http)
        if body.get("abort_all"):
            self.scheduler.abort_all()
        else:
            self.scheduler.abort(body.get("rid") or "")
        return web.Response()

    async def pause(self, http: web.Request) -> web.Response:
        """abort, retract or in_place."""
        mode = (await _body(http)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            return _error(f"mode must be one of {PAUSE_MODES}, not {mode!r}")
        await self.scheduler.pause(mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, http: web.Request) -> web.Response:
        """Also 200 when nothing is paused."""
        self.scheduler.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def release(self, http: web.Request) -> web.Response:
        """Releasing twice is fine; releasing while something runs is not."""
        tags = (await _body(http)).get("tags") or TAGS
        if not self.scheduler.idle():
            return _error("release_memory_occupation should be called only when server is idle")
        if "kv_cache" in tags:
            self.scheduler.flush()
        self.released.update(tags)
        return _json(None)

    async def onload(self, http: web.Request) -> web.Response:
        """Only what is released can be resumed."""
        tags = (await _body(http)).get("tags") or TAGS
        strangers = sorted(set(tags) - self.released)
        if strangers:
            return _error(f"{strangers} are not released")
        self.released.difference_update(tags)
        return _json(None)

    # --- weights ----------------------------------------------------------------------------------------------------

    async def begin(self, http: web.Request) -> web.Response:
        """Opens the one update session."""
        if self.updating:
            return _result(False, "a weight-update session is already open; call end_weight_update() first")
        self.updating = True
        return _result(True, "Success")

    async def end(self, http: web.Request) -> web.Response:
        """Closes it."""
        if not self.updating:
            return _result(False, "no weight-update session is open; call begin_weight_update() first")
        self.updating = False
        return _result(True, "Success")

    async def load_tensors(self, http: web.Request) -> web.Response:
        """Only between begin and end."""
        body = await _body(http)
        if not self.updating:
            return _result(
                False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            )

        def read() -> dict[str, weights.Tensor]:
            payload = base64.b64decode(body["serialized_named_tensors"][0], validate=True)
            return weights.from_pickle(payload, body.get("load_format"))

        return await self._load(body, read)

    async def load_disk(self, http: web.Request) -> web.Response:
        """Inside or outside a session."""
        body = await _body(http)
        return await self._load(body, lambda: weights.from_folder(Path(body["model_path"])))

    async def _load(self, body: dict[str, Any], read: Callable[[], dict[str, weights.Tensor]]) -> web.Response:
        if body.get("abort_all_requests"):
            self.scheduler.abort_all()
        if self.scheduler.paused is None:
            await self.scheduler.until_empty()
        try:
            self.weights |= read()
        except (weights.WeightsRefused, binascii.Error, OSError) as error:
            return _result(False, str(error))
        if body.get("weight_version") is not None:
            self.scheduler.version = int(body["weight_version"])
        if body.get("flush_cache", True) and not self.scheduler.flush():
            return _result(False, "weights were updated but the cache was not flushed: requests are pending")
        return _result(True, "Success")

    async def set_version(self, http: web.Request) -> web.Response:
        """Aborts everything unless told not to, as the real one does."""
        body = await _body(http)
        if body.get("abort_all_requests", True):
            self.scheduler.abort_all()
        self.scheduler.version = int(body["new_version"])
        return _json({"success": True, "message": "Weight version updated", "new_version": body["new_version"]})

    async def check_weights(self, http: web.Request) -> web.Response:
        """Checksum of each tensor, one rank."""
        return _json({"success": True, "message": "", "ranks": [{"checksums": weights.checksums(self.weights)}]})


# --- bodies ---------------------------------------------------------------------------------------------------------


async def _body(http: web.Request) -> dict[str, Any]:
    raw = await http.read()
    body = orjson.loads(raw) if raw else {}
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return body


def _sampling(params: dict[str, Any]) -> Sampling:
    stop, stop_ids = params.get("stop") or (), params.get("stop_token_ids") or ()
    return Sampling(
        **{name: params[name] for name in _PLAIN if params.get(name) is not None},
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(stop_ids),
    )


_PLAIN = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "ignore_eos", "sampling_seed")


def _spans(versions: list[int]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": str(version), "start": index, "end": index + 1})
    return spans


def _json(data: object) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type="application/json")


def _result(success: bool, message: str) -> web.Response:
    body = orjson.dumps({"success": success, "message": message})
    return web.Response(body=body, status=200 if success else 400, content_type="application/json")


def _error(message: str) -> web.Response:
    body = orjson.dumps({"error": {"message": message}})
    return web.Response(body=body, status=400, content_type="application/json")


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def _decoder(folder: Path) -> Callable[[list[int]], str] | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer  # kept out of a start that needs no text

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(ids))
