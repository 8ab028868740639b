"""The fake engine's scheduler: which request may take a step, what a pause, an abort and a flush do to it.

It follows SGLang's observable rules. A request waits at the *door* while generation is paused (an abort for it there is
lost, and so is every later one), then in the *queue*, then it is *running*. An abort matches by prefix. A retracted
request goes back to the queue; if it is aborted there its answer has tokens but no routes. The key-value cache maps
each fed prefix to the weight version that fed it, so routes survive what the cache survives and no more.

Invariants: one step appends one token; a running request between steps has fed all its tokens but the last; nobody
steps while paused; a flush succeeds only when nothing runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.engines.fake.model import FakeModel, mix

ABORT_POLL_S = 1.0
PAUSE_MODES = ("abort", "retract", "in_place")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The part of sampling_params that the fake honours."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    sampling_seed: int | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One request and how far it is. context: prompt and output ids; states: hash of the context after each of them;
    fed: weight version that fed each token so far; versions: weight version that sampled each output token."""

    rid: str
    prompt_tokens: int
    context: list[int]
    sampling: Sampling
    states: list[int]
    salt: int = 0
    cache_key: int = 0
    place: Literal["door", "queue", "running"] = "door"
    abort_sent: bool = False
    cut: bool = False
    cached: int | None = None
    fed: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    retractions: int = 0
    finish: dict[str, Any] | None = None
    text: str = ""

    @property
    def output_ids(self) -> list[int]:
        """Tokens sampled so far."""
        return self.context[self.prompt_tokens :]

    @property
    def has_routes(self) -> bool:
        """True if every token but the last has been fed since the last retraction."""
        return len(self.fed) == len(self.context) - 1 and self.place == "running"


class Scheduler:
    """All requests of one fake engine. `text_of` decodes output ids, or is None where there is no tokenizer."""

    def __init__(
        self,
        model: FakeModel,
        *,
        version: int,
        token_s: float,
        max_running: int,
        max_cached_tokens: int,
        text_of: Callable[[list[int]], str] | None,
    ) -> None:
        self.model, self.version, self.token_s = model, version, token_s
        self.max_running, self.max_cached_tokens, self.text_of = max_running, max_cached_tokens, text_of
        self.requests: dict[str, Request] = {}
        self.paused: str | None = None
        self._cache: dict[int, int] = {}
        self._changed = asyncio.Event()

    # --- generating -------------------------------------------------------------------------------------------------

    async def steps(self, request: Request) -> AsyncGenerator[None]:
        """Yields after each token; when it ends, `request.finish` says why. Closing it removes the request."""
        self.requests[request.rid] = request
        try:
            await self._until(lambda: self.paused is None)
            request.place = "queue"
            while request.finish is None:
                await self._until(lambda: request.finish is not None or self._may_act(request))
                if request.finish is not None:
                    break
                request.place = "running"
                if not request.cut:
                    await asyncio.sleep(self.token_s)
                if request.place == "running" and self._may_act(request):
                    self._act(request)
                    yield
        finally:
            del self.requests[request.rid]
            self._wake()

    def _may_act(self, request: Request) -> bool:
        if request.place == "running":
            return self.paused in (None, "abort")
        return self.paused is None and self._count("running") < self.max_running

    def _act(self, request: Request) -> None:
        if request.cut:
            request.finish = {"type": "abort", "message": "Aborted"}
            return
        self._feed(request)
        made, sampling = len(request.versions), request.sampling
        may_end = not sampling.ignore_eos and made >= sampling.min_new_tokens
        token = self.model.next_token(request.states[-1], may_end=may_end, salt=request.salt)
        keep = sampling.top_k if sampling.temperature > 0 and sampling.top_k > 1 else 1
        request.kept.append(self.model.kept(token, request.states[-1], min(keep, self.model.vocab_size)))
        request.context.append(token)
        request.states.append(mix(request.states[-1], token))
        request.versions.append(self.version)
        self._check_finished(request, token)

    def _feed(self, request: Request) -> None:
        """Run the model over what is not fed yet; the last token is always computed, never taken from the cache."""
        hits, contiguous = 0, not request.fed
        for state in request.states[len(request.fed) : -1]:
            version = self._cache.get(mix(state, request.cache_key)) if contiguous else None
            contiguous = version is not None
            hits += contiguous
            request.fed.append(self._store(request, state) if version is None else version)
        request.fed.append(self._store(request, request.states[-1]))
        if request.cached is None:
            request.cached = hits

    def _store(self, request: Request, state: int) -> int:
        if len(self._cache) >= self.max_cached_tokens:
            self._cache.clear()
        self._cache[mix(state, request.cache_key)] = self.version
        return self.version

    def _check_finished(self, request: Request, token: int) -> None:
        sampling, made = request.sampling, len(request.versions)
        if self.text_of is not None:
            request.text = self.text_of(request.output_ids)
        if made >= sampling.max_new_tokens:
            request.finish = {"type": "length", "length": sampling.max_new_tokens}
        elif (  # ignore_eos ignores stop_token_ids with it, as in the real engine
            not sampling.ignore_eos
            and made >= sampling.min_new_tokens
            and (token in sampling.stop_token_ids or token == self.model.eos_id)
        ):
            request.finish = {"type": "stop", "matched": token}
        else:
            for stop in sampling.stop:
                if stop in request.text:
                    request.text = request.text[: request.text.index(stop)]
                    request.finish = {"type": "stop", "matched": stop}
                    return

    # --- control ----------------------------------------------------------------------------------------------------

    def abort(self, rid: str) -> None:
        """Abort the request with this id and, as the engine does, every other one whose id starts with it."""
        known = self.requests.get(rid)
        if known is None or known.abort_sent:
            return
        known.abort_sent = True
        self._abort([request for request in self.requests.values() if request.rid.startswith(rid)])

    def abort_all(self) -> None:
        """Abort whatever has passed the door."""
        self._abort(list(self.requests.values()))

    def _abort(self, requests: list[Request]) -> None:
        for request in requests:
            if request.place == "queue":
                request.finish = {"type": "abort", "message": "Abort in waiting queue"}
            elif request.place == "running":
                request.cut = True
        self._wake()

    async def pause(self, mode: str) -> None:
        """Stop stepping, as `mode` says; abort returns when nothing is left."""
        self.paused = mode
        if mode == "abort":
            self.abort_all()
            while self._count("running") + self._count("queue"):
                await asyncio.sleep(ABORT_POLL_S)
                self.abort_all()
        elif mode == "retract":
            for request in self.requests.values():
                if request.place == "running":
                    request.place = "queue"
                    request.fed.clear()
                    request.retractions += 1
        self._wake()

    def resume(self) -> None:
        """Step again and open the door."""
        self.paused = None
        self._wake()

    def idle(self) -> bool:
        """True if nothing runs, and nothing waits unless it waits because of a pause."""
        waiting = 0 if self.paused in ("retract", "in_place") else self._count("queue")
        return self._count("running") + waiting == 0

    def flush(self) -> bool:
        """Empty the key-value cache; False (and nothing done) if the engine is not idle."""
        if not self.idle():
            return False
        self._cache.clear()
        return True

    async def until_empty(self) -> None:
        """Wait for the last request that has passed the door."""
        await self._until(lambda: self._count("running") + self._count("queue") == 0)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _count(self, place: str) -> int:
        return sum(request.place == place for request in self.requests.values())
