"""The control endpoints of one running engine: health, pause, memory, weights.

`EngineControl` belongs to the owner of the engine process and lives as long as that process: it remembers whether the
engine is paused and which tags are released, because the engine dies of what contradicts its state (SGLang's scheduler
asserts) instead of refusing it. Generation does not pass through here.

Invariants: every call has a deadline; a call that the engine would die of, or would half-do and answer with an error,
raises EngineError before it is sent; an answer with success=false raises EngineError with the engine's name and words.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
import msgspec
import orjson

from segue.errors import EngineError, EngineUnavailable
from segue.wire.engine import Capabilities, decode_version, encode_abort, error_of

PauseMode = Literal["abort", "retract", "in_place"]
RELEASE_TAGS = ("weights", "kv_cache", "cuda_graph")
HEALTH_TIMEOUT_S = 5.0
FLUSH_MARGIN_S = 30.0


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself. `max_total_tokens`: size of its KV cache, None if it does not say."""

    model_path: str
    weight_version: int
    engine_version: str
    max_total_tokens: int | None
    returns_routed_experts: bool


class EngineControl:
    """Client of one engine's control endpoints; also a receiver of weights (begin, load_*, end).

    `timeout_s` bounds every call that has no deadline of its own. `start_version` is the weight version of an engine
    that was started without one.
    """

    def __init__(
        self, url: str, *, name: str, timeout_s: float = 120.0, tp_size: int = 1, start_version: int = 0
    ) -> None:
        self.url, self.name, self.timeout_s = url, name, timeout_s
        self.tp_size, self.start_version = tp_size, start_version
        self.capabilities: Capabilities | None = None
        self.paused: PauseMode | None = None
        self.released: frozenset[str] = frozenset()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Calls are rare and the server closes idle connections: a kept one would fail at the moment of reuse.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    # --- what it is and whether it lives --------------------------------------------------------------------------

    async def health(self) -> bool:
        """True if the server answers, paused or not. Never raises for an engine that is down."""
        try:
            status, _ = await self._call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except EngineUnavailable:
            return False
        return status == 200

    async def info(self) -> EngineInfo:
        """Model, weight version and sizes, as they are now."""
        model = orjson.loads(await self._ok("GET", "/model_info"))
        server = orjson.loads(await self._ok("GET", "/server_info"))
        return EngineInfo(
            model_path=model["model_path"],
            weight_version=decode_version(model["weight_version"], self.start_version),
            engine_version=str(server.get("version", "")),
            max_total_tokens=server.get("max_total_num_tokens"),
            returns_routed_experts=bool(server.get("enable_return_routed_experts", False)),
        )

    async def probe(self) -> Capabilities:
        """Find out what the engine can do, by generating one token (which warms it up) and looking at its routes.

        Only on an engine that is not paused.
        """
        self._refuse_if(self.paused is not None, "probe", f"it is paused ({self.paused})")
        info = await self.info()
        # GET on a route that only takes POST: 405 if it is there, 404 if not, and nothing begins.
        status, _ = await self._call("GET", "/begin_weight_update")
        body = orjson.dumps({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        meta = orjson.loads(await self._ok("POST", "/generate", body))["meta_info"]
        self.capabilities = Capabilities(
            begin_end=status != 404,
            weight_versions="weight_versions" in meta,
            routed_experts=info.returns_routed_experts,
            release_tags=RELEASE_TAGS,
        )
        return self.capabilities

    # --- pause and resume -------------------------------------------------------------------------------------------

    async def abort(self, rid: str) -> None:
        """Cut one request; its generate call returns what there is. Unknown ids have no effect.

        Not on a paused engine, which loses it for requests that wait at its door.
        """
        self._refuse_if(self.paused is not None, "abort", f"it is paused ({self.paused})")
        await self._ok("POST", "/abort_request", encode_abort(rid))

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. Requests that run: cut (abort, polls each second), queued (retract), frozen (in_place)."""
        self._refuse_if(self.paused not in (None, mode), f"pause({mode})", f"it is paused ({self.paused}) already")
        self.paused = mode  # before the call: a pause that times out may have taken hold
        await self._ok("POST", "/pause_generation", orjson.dumps({"mode": mode}))

    async def resume(self) -> None:
        """Generate again. Harmless on an engine that is not paused; refused while memory is released."""
        self._refuse_if(bool(self.released), "resume", f"{', '.join(sorted(self.released))} are released")
        await self._ok("POST", "/continue_generation", b"{}")
        self.paused = None

    async def flush(self, timeout_s: float = 10.0) -> None:
        """Empty the prefix cache; EngineError if requests still run after `timeout_s` (at once if paused)."""
        self._refuse_if(self.paused == "in_place", "flush", "an in_place pause keeps the cache of frozen requests")
        # A paused engine runs nothing, and one asked to wait would wait for its queue, which cannot move.
        wait_s = 0.0 if self.paused else timeout_s
        await self._ok("POST", f"/flush_cache?timeout={wait_s:g}", b"", timeout_s=wait_s + FLUSH_MARGIN_S)

    # --- memory -----------------------------------------------------------------------------------------------------

    async def release(self, tags: Iterable[str]) -> tuple[str, ...]:
        """Give back the memory of `tags`; returns those that were resident. Empties the prefix cache.

        Only while paused (abort or retract): the flush before it fails exactly where the release would kill the engine.
        """
        wanted = self._ordered(tags, lambda tag: tag not in self.released)
        if wanted:
            allowed = self.paused in ("abort", "retract")
            self._refuse_if(not allowed, "release", f"it must be paused by abort or retract, not {self.paused}")
            await self.flush()
            await self._ok("POST", "/release_memory_occupation", orjson.dumps({"tags": wanted}))
            self.released |= frozenset(wanted)
        return wanted

    async def onload(self, tags: Iterable[str]) -> tuple[str, ...]:
        """Take back the memory of `tags`; returns those that were released, the others are left alone.

        Released weights come back as whatever the memory holds: load them before resuming.
        """
        wanted = self._ordered(tags, lambda tag: tag in self.released)
        if wanted:
            await self._ok("POST", "/resume_memory_occupation", orjson.dumps({"tags": wanted}))
            self.released -= frozenset(wanted)
        return wanted

    # --- weights ----------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Open a weight update; a no-op on an engine that has no such call."""
        await self._session_call("/begin_weight_update")

    async def end(self) -> None:
        """Close a weight update; a no-op on an engine that has no such call."""
        await self._session_call("/end_weight_update")

    async def load_tensors(
        self, serialized: bytes, *, load_format: str | None, version: int, flush_cache: bool
    ) -> None:
        """Load pickled (name, tensor) pairs, or one flattened bucket, between begin and end."""
        self._check_load("load_tensors", flush_cache)
        fields = {"load_format": load_format, "weight_version": str(version), "flush_cache": flush_cache}

        def encode() -> bytes:
            payload = base64.b64encode(serialized).decode("ascii")
            return orjson.dumps({"serialized_named_tensors": [payload] * self.tp_size, **fields})

        path = "/update_weights_from_tensor"
        self._succeed(path, *await self._call("POST", path, await asyncio.to_thread(encode)))

    async def load_disk(self, path: str, *, version: int, flush_cache: bool) -> None:
        """Load a checkpoint folder that the engine can read. Waits for running requests unless paused."""
        self._check_load("load_disk", flush_cache)
        fields = {"model_path": path, "weight_version": str(version), "flush_cache": flush_cache}
        await self._load("/update_weights_from_disk", fields)

    async def set_version(self, version: int) -> None:
        """Rename the weights that are loaded. Running requests go on."""
        # The engine's own default here is to abort them all.
        await self._load("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def checksums(self) -> dict[str, str]:
        """Checksum of every tensor under the engine's own names; prefixed "rank<i>/" if there are several ranks."""
        answer = await self._load("/weights_checker", {"action": "checksum"})
        ranks = [rank["checksums"] for rank in answer["ranks"]]
        if len(ranks) == 1:
            return dict(ranks[0])
        return {f"rank{i}/{name}": value for i, sums in enumerate(ranks) for name, value in sums.items()}

    # --- parts ------------------------------------------------------------------------------------------------------

    def _ordered(self, tags: Iterable[str], wanted: Any) -> tuple[str, ...]:
        tags = set(tags)
        unknown = tags.difference(RELEASE_TAGS)
        self._refuse_if(bool(unknown), "release/onload", f"it has no tags {sorted(unknown)}, only {RELEASE_TAGS}")
        return tuple(tag for tag in RELEASE_TAGS if tag in tags and wanted(tag))

    def _check_load(self, call: str, flush_cache: bool) -> None:
        in_place = self.paused == "in_place" and flush_cache
        self._refuse_if(in_place, call, "an in_place pause cannot flush: it would load the weights and then fail")
        self._refuse_if("weights" in self.released, call, "its weights are released")

    def _refuse_if(self, wrong: bool, call: str, why: str) -> None:
        if wrong:
            raise EngineError(f"engine {self.name}: {call} refused: {why}")

    async def _session_call(self, path: str) -> None:
        if self.capabilities is not None and not self.capabilities.begin_end:
            return
        status, body = await self._call("POST", path, b"{}")
        if status == 404:
            return
        self._succeed(path, status, body)

    async def _load(self, path: str, fields: dict[str, Any]) -> Any:
        status, body = await self._call("POST", path, orjson.dumps(fields))
        return self._succeed(path, status, body)

    def _succeed(self, path: str, status: int, body: bytes) -> Any:
        if status != 200:
            raise error_of(status, body, f"engine {self.name} {path}")
        answer = orjson.loads(body)
        if not answer.get("success", False):
            raise EngineError(f"engine {self.name} {path}: {answer.get('message', answer)}")
        return answer

    async def _ok(self, method: str, path: str, body: bytes | None = None, *, timeout_s: float | None = None) -> bytes:
        status, answer = await self._call(method, path, body, timeout_s=timeout_s)
        if status != 200:
            raise error_of(status, answer, f"engine {self.name} {path}")
        return answer

    async def _call(
        self, method: str, path: str, body: bytes | None = None, *, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        if self._session is None:
            raise EngineError(f"engine {self.name}: the control client was not entered (async with)")
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        headers = {"content-type": "application/json"} if body else {}
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(
                    method,
                    self.url + path,
                    data=io.BytesIO(body) if body else None,  # sent in pieces, however large
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as answer,
            ):
                return answer.status, await answer.read()
        except TimeoutError as error:
            raise EngineUnavailable(f"engine {self.name} {path}: no answer within {deadline_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"engine {self.name} {path}: {error!r}") from error
