"""How sessions end: finished, abandoned, expired. And the repair of endings that a crash has cut short.

Invariants: the ending fact comes first, then the outcome of the rollout (SampleReady or SampleRejected), then the end
of its lease; each is a no-op when repeated, so a repair just goes through all of them again; the bytes of a sample are
in the blob store before SampleReady says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from segue.blobs import BlobStore
from segue.errors import CodecError, RequestError
from segue.events import Bulk
from segue.events.sample import RewardRecorded, SampleReady, SampleRejected
from segue.events.session import SessionAbandoned, SessionExpired, SessionFinished
from segue.events.work import RolloutReceived, RolloutReturned
from session_server.assemble import Assembled, assemble, sample_id_of, total_reward
from session_server.engine_client import RouterClient
from session_server.facts import Facts
from session_server.families import Generic
from session_server.selection import Steps
from session_server.sessions import Session, Sessions, Tombstone
from session_server.turns import Spawn
from session_server.work import Work

SETTLE_DEADLINE_S = 30.0
THREAD_FROM_TOKENS = 2048
"""Assembling less takes less time than a hand-over to a thread, unless somebody else's code has a part in it."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishBody:
    """What the environment says at the end. rewards: (key, value, turn) to be recorded, turn -1 for the whole."""

    status: str = "ok"
    rewards: tuple[tuple[str, float, int], ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Endings:
    facts: Facts
    blobs: BlobStore
    sessions: Sessions
    work: Work
    router: RouterClient
    family: Generic
    spawn: Spawn
    steps: Steps = field(default_factory=Steps)

    async def reward(self, session: Session, key: str, value: float, turn: int) -> None:
        """Record a reward once per key. Raises RequestError 409 for another value under a known key."""
        known = session.rewards.get(key)
        if known is None:
            fact = RewardRecorded(session_id=session.session_id, reward_key=key, value=value, turn=turn)
            session.rewards[key] = fact
            session.reward_writes[key] = self.facts.submit(fact, session=session)
        elif (known.value, known.turn) != (value, turn):
            message = f"reward '{key}' is recorded as {known.value} for turn {known.turn}"
            raise RequestError(409, "conflict_error", message, "key")
        if (written := session.reward_writes.get(key)) is not None:
            await self.facts.settled(written)

    async def finish(self, session: Session, body: FinishBody) -> Tombstone:
        """Finish once; whoever comes second gets the first's answer."""
        if session.ending:
            return await self._wait_ended(session)
        for key, value, turn in body.rewards:
            known = session.rewards.get(key)
            if known is not None and (known.value, known.turn) != (value, turn):
                raise RequestError(409, "conflict_error", f"reward '{key}' is recorded with another value", key)
        session.ending = "finished"
        await self._stop_turns(session, "the session was finished")
        for key, value, turn in body.rewards:
            await self.reward(session, key, value, turn)
        finished = SessionFinished(session_id=session.session_id, status=body.status, metadata=dict(body.metadata))
        await self.facts.append(finished, session=session)
        return await self.conclude(session, finished)

    async def conclude(self, session: Session, finished: SessionFinished) -> Tombstone:
        """Everything that follows SessionFinished."""
        outcome, status = await self._outcome(session, finished)
        await self.facts.append(outcome, session=session)
        return await self.received(session, outcome, finished.status, status)

    async def received(
        self, session: Session, outcome: SampleReady | SampleRejected, said: str, status: int = 200
    ) -> Tombstone:
        """Everything that follows the outcome of a finished session."""
        opened = session.opened
        if session.lease_attempt >= 0:
            await self.facts.append(
                RolloutReceived(rollout_id=opened.rollout_id, session_id=opened.session_id, status=said),
                session=session,
            )
        return self._bury(session, finish_tombstone(outcome, opened.token_digest, status))

    async def abandon(self, session: Session, reason: str) -> None:
        """No sample; its group member fails at once."""
        if session.ending:
            await self._wait_ended(session)
            return
        session.ending = "abandoned"
        await self._stop_turns(session, "the session was deleted")
        await self.facts.append(SessionAbandoned(session_id=session.session_id, reason=reason), session=session)
        await self.abandoned(session)

    async def abandoned(self, session: Session) -> None:
        """Everything that follows SessionAbandoned."""
        await self._fail_rollout(session, "abandoned", final=True)
        self._bury(session, Tombstone("abandoned", session.opened.token_digest))

    async def expire(self, session: Session, reason: str) -> None:
        """Its time is up: a leased rollout goes back to the pool, if it may be leased again."""
        session.ending = "expired"
        await self._stop_turns(session, "the session expired")
        await self.facts.append(SessionExpired(session_id=session.session_id, reason=reason), session=session)
        await self.expired(session)

    async def expired(self, session: Session) -> None:
        """Everything that follows SessionExpired."""
        final = session.lease_attempt < 0 or self.work.is_final(session.lease_attempt)
        await self._fail_rollout(session, "expired", final=final)
        self._bury(session, Tombstone("expired", session.opened.token_digest))

    async def _fail_rollout(self, session: Session, reason: str, *, final: bool) -> None:
        opened = session.opened
        if final:
            await self.facts.append(
                SampleRejected(
                    rollout_id=opened.rollout_id, session_id=opened.session_id, purpose=opened.purpose,
                    group=opened.group, member=opened.member, reason=reason,
                ),
                session=session,
            )  # fmt: skip
        if session.lease_attempt >= 0:
            await self.facts.append(
                RolloutReturned(
                    rollout_id=opened.rollout_id, attempt=session.lease_attempt, reason=reason, final=final
                ),
                session=session,
            )

    async def _wait_ended(self, session: Session) -> Tombstone:
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            await session.ended.wait()
        tombstone = self.sessions.tombstone(session.session_id)
        assert tombstone is not None
        return tombstone

    async def _stop_turns(self, session: Session, reason: str) -> None:
        """Cancel what is being generated, and wait until each has closed its bracket."""
        tasks = [attempt.task for attempt in session.attempts.values() if attempt.task is not None]
        for attempt in list(session.attempts.values()):
            attempt.cancel(reason)
        if tasks:
            await asyncio.wait(tasks, timeout=SETTLE_DEADLINE_S)

    async def _outcome(self, session: Session, finished: SessionFinished) -> tuple[SampleReady | SampleRejected, int]:
        reward = total_reward(session.rewards.values())
        try:
            made = await self.assembled(session, reward or 0.0, self._metadata(session, finished), with_mask=True)
            if made is None:
                raise RequestError(200, "", "no committed turn that was delivered")
            if reward is None:
                raise RequestError(200, "", "no reward")
            return await self._ready(session, *made, reward), 200
        except (RequestError, CodecError) as error:
            opened = session.opened
            status, reason = (error.status, error.message) if isinstance(error, RequestError) else (422, str(error))
            _logger.warning("session %s has no sample: %s", session.session_id, reason)
            return SampleRejected(
                rollout_id=opened.rollout_id, session_id=opened.session_id, purpose=opened.purpose, group=opened.group,
                member=opened.member, reason=reason,
            ), status  # fmt: skip

    def _metadata(self, session: Session, finished: SessionFinished) -> dict[str, str]:
        return {
            **session.opened.metadata, **finished.metadata, "status": finished.status, "family": self.family.name,
            "append_only": "proved" if self.family.proved else "best effort",
        }  # fmt: skip

    async def assembled(
        self, session: Session, reward: float, metadata: Mapping[str, str], *, with_mask: bool,
        max_tokens: int | None = None,
    ) -> tuple[Assembled, bytes] | None:  # fmt: skip
        """What the session would give as it stands now, and its frame; None if no leaf trains. Changes nothing.

        Raises RequestError 422 and CodecError, naming the token or row that makes it impossible.
        """
        graph, rewards = session.graph.snapshot(), list(session.rewards.values())

        def make() -> tuple[Assembled, bytes] | None:
            made = assemble(
                session.opened, graph, rewards, metadata, reward=reward, max_tokens=max_tokens, steps=self.steps
            )
            return (made, made.frame(with_mask=with_mask)) if made is not None else None

        small = sum(node.total_tokens for node in graph.nodes if not node.children) < THREAD_FROM_TOKENS
        inline = small and not session.bytes_spilled and self.steps == Steps()
        return make() if inline else await asyncio.to_thread(make)

    async def _ready(self, session: Session, made: Assembled, data: bytes, reward: float) -> SampleReady:
        # Never inline: the trainer finds a frame by its digest alone.
        frame = Bulk(await self.blobs.put_async(data), len(data))
        opened, turns = session.opened, made.turns
        versions = [version for node in turns for _, _, version in node.tokens.spans]
        return SampleReady(
            sample_id=sample_id_of(opened.rollout_id), rollout_id=opened.rollout_id, session_id=opened.session_id,
            purpose=opened.purpose, group=opened.group, member=opened.member, reward=reward,
            tokens=sum(len(sample.tokens) for sample in made.samples),
            trained_tokens=sum(int(sample.loss_mask.sum()) for sample in made.samples), turns=len(turns),
            partial_turns=sum(node.parts > 1 for node in turns), oldest_version=min(versions, default=2**31 - 1),
            newest_version=max(versions, default=0), frame=frame, frame_digest=frame.digest,
        )  # fmt: skip

    def _bury(self, session: Session, tombstone: Tombstone) -> Tombstone:
        self.sessions.bury(session.session_id, tombstone)
        if session.assignment is not None:
            self.spawn(self.router.release(session.session_id))
        return tombstone


def finish_tombstone(outcome: SampleReady | SampleRejected, token_digest: str, status: int = 200) -> Tombstone:
    """The tombstone of a finished session; its answer is the same before and after a restart (but for status 422)."""
    answer: dict[str, object] = {
        "session_id": outcome.session_id, "rollout_id": outcome.rollout_id, "sample_id": None, "rejected": None
    }  # fmt: skip
    if isinstance(outcome, SampleReady):
        answer |= {
            "sample_id": outcome.sample_id, "reward": outcome.reward, "tokens": outcome.tokens,
            "trained_tokens": outcome.trained_tokens, "turns": outcome.turns, "frame_digest": outcome.frame_digest,
        }  # fmt: skip
    else:
        answer["rejected"] = outcome.reason
    return Tombstone("finished", token_digest, answer, status)
