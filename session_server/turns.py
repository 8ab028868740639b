"""The life of one turn: placed, sent, perhaps cut and carried on, committed.

Invariants: every request to an engine is bracketed in the log by TurnStarted or TurnResumed and exactly one of
TurnCommitted, TurnInterrupted, TurnDiscarded, TurnFailed; a request passes the gate and enters `running` in one step;
nothing of the session changes before TurnCommitted stands in the log; the whole turn, waiting included, is bounded by
the turn deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from segue.blobs import BlobStore
from segue.clock import Clock
from segue.config.schema import Config
from segue.errors import EngineError, EngineUnavailable, RequestError, SegueError
from segue.events.base import Body
from segue.events.turn import TurnDiscarded, TurnFailed, TurnInterrupted, TurnResumed, TurnStarted
from segue.ids import fresh_id
from segue.log.writer import Written
from segue.wire.engine import GenerateAnswer, GenerateRequest, SamplingParams
from segue.wire.ids import EncodedIds
from segue.wire.rows import RowLedger
from session_server import record
from session_server.answers import stop_over_seam
from session_server.attempt import Ask, Attempt
from session_server.budget import Budget
from session_server.engine_client import Assignment, EngineClient, RouterClient, assign_until
from session_server.facts import Facts
from session_server.families import Generic
from session_server.graph import Node
from session_server.partial import Partial
from session_server.pause import Gate, Running, RunningRequest

MAX_BACKOFF_S = 2.0
_logger = logging.getLogger(__name__)
Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]


@dataclass(slots=True, eq=False)
class Part:
    """One request of a turn. `closed`: its closing fact was submitted."""

    running: RunningRequest
    request: GenerateRequest
    opened: asyncio.Future[Written]
    kept: int
    closed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """`spawn` runs a coroutine in the server's task group. `empty_rows`: ledger of an empty path, None without R3."""

    config: Config
    clock: Clock
    facts: Facts
    blobs: BlobStore
    engines: EngineClient
    router: RouterClient
    gate: Gate
    running: Running
    family: Generic
    spawn: Spawn
    empty_rows: RowLedger | None
    budget: Budget

    def start(self, ask: Ask) -> Attempt:
        """Begin to generate; whoever wants the answer awaits `done` (shielded)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.rollout.turn_deadline_s
        attempt = Attempt(fresh_id("turn"), ask, loop.create_future(), deadline)
        ask.session.attempts[attempt.turn_id] = attempt
        attempt.task = self.spawn(self._live(attempt))
        return attempt

    async def _live(self, attempt: Attempt) -> None:
        try:
            async with asyncio.timeout_at(attempt.deadline_s):
                node = await self._generate(attempt)
            attempt.finish(node)
        except TimeoutError:
            attempt.fail(self._too_late())
        except asyncio.CancelledError:
            reason = attempt.cancelled_as
            if not reason:
                attempt.fail(RequestError(503, "server_error", "the server is stopping"))
                raise
            attempt.fail(RequestError(409, "conflict_error", reason))
        except SegueError as error:
            attempt.fail(error)
        except Exception as error:
            _logger.exception("turn %s failed", attempt.turn_id)
            attempt.fail(error)
        finally:
            attempt.ask.session.attempts.pop(attempt.turn_id, None)

    def _too_late(self) -> RequestError:
        after = f"after {self.config.rollout.turn_deadline_s:g} s"
        if self.gate.pause is not None:
            return RequestError(503, "server_error", f"paused beyond the turn deadline, {after}")
        return RequestError(504, "engine_error", f"no answer of an engine {after}")

    async def _generate(self, attempt: Attempt) -> Node:
        ask = attempt.ask
        before = ask.parent.encoded_ids() if ask.parent is not None else EncodedIds()
        rows = ask.parent.rows if ask.parent is not None else self.empty_rows
        partial = Partial(before.joined([ask.prompt]), rows, masked=ask.sampling.masked)
        exclude: list[str] = []
        waiting, troubles = "", 0  # the request that was cut last, while the turn is at no engine
        try:
            while True:
                place = await self._place(attempt, exclude, cut=bool(waiting))
                part, waiting = self._send(attempt, partial, place), ""
                try:
                    answer = await self._answer(part, attempt, partial)
                    node = await self._close(part, attempt, partial, answer)
                except EngineUnavailable as error:
                    _logger.warning("turn %s: %s", attempt.turn_id, error)
                    await self._end(part, self._discarded(part.running.request_id, attempt, 0, "engine unavailable"))
                    self.spawn(self._abort(part.running))
                    ask.session.assignment, exclude, node = None, [place.engine_id], None
                except BaseException as error:
                    self._give_up(part, attempt, partial, error)
                    raise
                finally:
                    self.running.settle(part.running)
                if node is not None:
                    return node
                waiting = part.running.request_id
                if part.running.cut is None:  # nobody asked for it: do not spin
                    await self.clock.sleep(min(MAX_BACKOFF_S, 0.05 * 2**troubles))
                    troubles += 1
        except BaseException:
            if waiting and partial.output:
                reason = attempt.cancelled_as or "turn given up"
                self.facts.submit(self._discarded(waiting, attempt, len(partial.output), reason), session=ask.session)
            raise

    async def _place(self, attempt: Attempt, exclude: list[str], *, cut: bool) -> Assignment:
        """An engine that may take a request right now: no await lies between this answer and the caller's next step."""
        session = attempt.ask.session
        while True:
            place = session.assignment
            if not self.gate.admits(place.engine_id if place is not None else None, cut=cut):
                held_from = self.clock.wall_s()
                await self.gate.changed()
                session.deadline_wall_s += max(0.0, self.clock.wall_s() - held_from)
            elif place is None:
                session.assignment = await assign_until(self.router, session.session_id, exclude)
            else:
                return place

    def _send(self, attempt: Attempt, partial: Partial, place: Assignment) -> Part:
        """Enter `running` and queue the opening fact; the request itself goes out while that is being appended."""
        ask, kept = attempt.ask, len(partial.output)
        request = self._request(ask, partial)
        running = RunningRequest(request.rid, place.engine_id, place.url)
        self.running.enter(running)
        names = {
            "session_id": ask.session.session_id, "turn_id": attempt.turn_id, "request_id": request.rid,
            "engine_id": place.engine_id,
        }  # fmt: skip
        opening: Body = (
            TurnResumed(**names, kept_tokens=kept)
            if kept
            else TurnStarted(**names, prompt_tokens=partial.prompt_tokens)
        )
        return Part(running, request, self.facts.submit(opening, session=ask.session), kept)

    def _request(self, ask: Ask, partial: Partial) -> GenerateRequest:
        kept, wanted = len(partial.output), ask.sampling
        return GenerateRequest(
            rid=fresh_id("req"),
            input_ids=EncodedIds.of(partial.prompt_ids).joined([partial.output]),
            sampling_params=SamplingParams(
                max_new_tokens=ask.max_new_tokens - kept, temperature=wanted.temperature, top_p=wanted.top_p,
                top_k=wanted.top_k, min_p=wanted.min_p, min_new_tokens=max(0, wanted.min_new_tokens - kept),
                stop=wanted.stop, stop_token_ids=self.family.stop_ids, sampling_seed=wanted.seed,
            ),
            return_logprob=True,
            stream=ask.stream,
            return_routed_experts=partial.rows is not None,
            routed_experts_start_len=partial.rows_start,
            return_sampling_mask=partial.masked,
        )  # fmt: skip

    async def _answer(self, part: Part, attempt: Attempt, partial: Partial) -> GenerateAnswer:
        kept = list(partial.output)
        on_progress = (lambda ids: attempt.progress(kept + ids)) if attempt.ask.stream else None
        try:
            # A stream has its own deadline, after which what had come is kept.
            limit_s = None if part.request.stream else self.engines.request_deadline_s
            async with asyncio.timeout(limit_s) as part.running.limit:
                answer = await self.engines.generate(part.running.url, part.request, on_progress)
        except TimeoutError as error:
            raise EngineUnavailable(f"{part.running.url} did not give back {part.request.rid} in time") from error
        await self.facts.settled(part.opened)
        return answer

    async def _close(self, part: Part, attempt: Attempt, partial: Partial, answer: GenerateAnswer) -> Node | None:
        """Commit the turn, or keep (or drop) what a cut left and return None."""
        ask = attempt.ask
        answer = partial.add(answer)
        seam = stop_over_seam(self.family.text, partial.output, part.kept, ask.sampling.stop)
        finish = answer.finish.type
        if seam is not None:
            partial.truncate(seam)
            finish = "stop"
        if finish in ("abort", "unfinished"):
            if len(partial.output) < ask.max_new_tokens:
                await self._cut(part, attempt, partial, answer)
                return None
            partial.fill_rows()
            finish = "length"
        commit = record.prepare(ask, attempt.turn_id, part.running.request_id, partial, finish, self.family)
        fact = await record.committed(commit, self.blobs)
        if ask.session.ending:
            raise RequestError(409, "conflict_error", f"the session is ending: {ask.session.ending}")
        part.closed = True
        written = self.facts.submit(fact, session=ask.session)
        node = record.node(commit, int(self.clock.wall_s()))
        written.add_done_callback(lambda done: self._add(ask, node, done))
        await self.facts.settled(written)
        return node

    async def _cut(self, part: Part, attempt: Attempt, partial: Partial, answer: GenerateAnswer) -> None:
        if part.running.cut == "drop" or not self.config.rollout.partial:
            dropped = partial.drop()
            attempt.progress([])
            await self._end(part, self._discarded(part.running.request_id, attempt, dropped, "cut by a pause"))
            return
        asked = part.running.cut is not None
        tokens, digest = await record.kept(answer, self.blobs)
        fact = TurnInterrupted(
            session_id=attempt.ask.session.session_id, turn_id=attempt.turn_id, request_id=part.running.request_id,
            engine_id=part.running.engine_id, kept_tokens=answer.completion_tokens, tokens=tokens, token_digest=digest,
            spans=answer.spans, reason="pause" if asked else answer.finish.message or "engine",
        )  # fmt: skip
        await self._end(part, fact)

    def _discarded(self, request_id: str, attempt: Attempt, dropped: int, reason: str) -> TurnDiscarded:
        return TurnDiscarded(
            session_id=attempt.ask.session.session_id, turn_id=attempt.turn_id, request_id=request_id,
            dropped_tokens=dropped, reason=reason,
        )  # fmt: skip

    async def _end(self, part: Part, fact: Body) -> None:
        part.closed = True
        await self.facts.append(fact)

    def _give_up(self, part: Part, attempt: Attempt, partial: Partial, error: BaseException) -> None:
        """Close the request's bracket and tell the engine to stop. Does not wait: it may run in a cancelled task."""
        if part.closed:
            return
        part.closed = True
        late = asyncio.get_running_loop().time() >= attempt.deadline_s
        if isinstance(error, asyncio.CancelledError) and not late:
            reason = attempt.cancelled_as or "server stopping"
            dropped = self._discarded(part.running.request_id, attempt, len(partial.output), reason)
            self.facts.submit(dropped, session=attempt.ask.session)
        else:
            status = self._too_late().status if late else 502 if isinstance(error, EngineError) else 500
            self.facts.submit(
                TurnFailed(
                    session_id=attempt.ask.session.session_id, turn_id=attempt.turn_id,
                    request_id=part.running.request_id, status=status, reason=str(error) or "turn deadline",
                ),
                session=attempt.ask.session,
            )  # fmt: skip
        if isinstance(error, asyncio.CancelledError):
            self.spawn(self._abort(part.running))

    async def _abort(self, request: RunningRequest) -> None:
        try:
            await self.engines.abort(request.url, request.request_id)
        except EngineError as error:
            _logger.warning("abort of %s: %s", request.request_id, error)

    def _add(self, ask: Ask, node: Node, written: asyncio.Future[Written]) -> None:
        """The fact stands in the log: the node is part of the graph, whether or not anybody still waits for it."""
        if not written.cancelled() and written.exception() is None:
            ask.session.graph.add(node)
            self.budget.grow(ask.session, node, record.node_bytes(node))
