"""From a valid request to what a turn needs: where it attaches, which tokens it adds, how long it may get.

Also rule 4: which requests are retries of a turn that exists already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from segue.config.schema import Config
from segue.errors import RequestError
from session_server.attempt import Ask, Attempt
from session_server.budget import Budget
from session_server.dialect import TurnBody
from session_server.families import Generic
from session_server.graph import Delivered, Node
from session_server.messages import Message, invalid
from session_server.record import TOKEN_LEVEL
from session_server.sampling import Sampling
from session_server.sessions import Session


@dataclass(frozen=True, slots=True)
class Marks:
    """What identifies a request: digest of its body, its Idempotency-Key, whether its client says that it retries."""

    digest: str
    key: str = ""
    retry: bool = False


def find_earlier(session: Session, marks: Marks) -> Node | Attempt | None:
    """The committed or running turn that this request asks for again, None if it asks for a new one.

    Raises RequestError 409 for a key that was used with another body.
    """
    running = list(session.attempts.values())
    if marks.key:
        node = session.graph.by_key.get(marks.key)
        found = node or next((a for a in running if a.ask.idempotency_key == marks.key), None)
        if found is not None:
            digest = found.request_digest if isinstance(found, Node) else found.ask.digest
            if digest != marks.digest:
                message = "this Idempotency-Key was used with another body"
                raise RequestError(409, "conflict_error", message, "Idempotency-Key")
            return found
    same_running = [a for a in running if a.ask.digest == marks.digest]
    same_nodes = session.graph.by_digest.get(marks.digest, ())
    if marks.retry:
        return same_running[-1] if same_running else same_nodes[-1] if same_nodes else None
    for attempt in same_running:
        if not attempt.awaited:
            return attempt
    return next((node for node in reversed(same_nodes) if node.delivered is not Delivered.YES), None)


@dataclass(frozen=True, slots=True)
class Asks:
    config: Config
    family: Generic
    budget: Budget

    def chat(self, session: Session, body: TurnBody, marks: Marks) -> Ask:
        """Raises RequestError 400 (does not fit, or the template refuses), 409 (on_length), 429 (bytes held)."""
        self._check_room(session)
        after = body.after
        named = after is not None and after.context == body.context
        parent = after if named else session.graph.attach(body.messages, body.context)
        if parent is None:
            ids = self.family.opening(body.messages, body.tools)
            appended = body.messages
        else:
            self._check_extendable(parent)
            appended = body.messages[parent.total_messages :]
            ids = self.family.appended(parent.last_id, parent.messages[-1].raw, appended, body.tools)
        comparison = self.config.session_server.comparison
        messages = tuple(Message(message, comparison) for message in appended)
        return self._ask(
            session, parent, body.context, messages, ids, body.sampling, marks, body.stream, body.use_tools
        )

    def tokens(self, session: Session, ids: list[int], sampling: Sampling, marks: Marks) -> Ask:
        """A token-level turn: the ids belong to the client, what of them is there already is found by its tokens."""
        self._check_room(session)
        self.family.text.check_ids(ids, "input_ids")
        given = np.array(ids, np.int32)
        parent = session.graph.attach_tokens(given, TOKEN_LEVEL)
        new = ids[parent.total_tokens :] if parent is not None else ids
        return self._ask(session, parent, TOKEN_LEVEL, (), new, sampling, marks, False, False)

    def _ask(
        self, session: Session, parent: Node | None, context: str, messages: tuple[Message, ...], ids: list[int],
        sampling: Sampling, marks: Marks, stream: bool, tools: bool,
    ) -> Ask:  # fmt: skip
        prompt_tokens = len(ids) + (parent.total_tokens if parent is not None else 0)
        return Ask(
            session=session, parent=parent, context=context, comparison=self.config.session_server.comparison,
            messages=messages, prompt=np.array(ids, np.int32), sampling=sampling,
            max_new_tokens=self._bound(session, prompt_tokens, sampling), tools=tools, digest=marks.digest,
            idempotency_key=marks.key, stream=stream,
        )  # fmt: skip

    def _bound(self, session: Session, prompt_tokens: int, sampling: Sampling) -> int:
        """New tokens that the turn may have: the least of what is asked for, the run's, the session's, the engine's."""
        if prompt_tokens == 0:
            raise invalid("the prompt is empty", "messages")
        whole = min(session.opened.token_budget, self.config.engine.context_length - 1)
        room = whole - prompt_tokens
        if room < 1:
            # In the words by which clients know that a conversation is full.
            message = f"this model's maximum context length is {whole} tokens, the prompt has {prompt_tokens}"
            raise RequestError(400, "context_length_exceeded", message, "messages")
        most = min(self.config.rollout.max_turn_tokens, room)
        return min(sampling.max_new_tokens or most, most)

    def _check_room(self, session: Session) -> None:
        self.budget.check()
        limit = self.config.session_server.max_session_bytes
        if session.bytes_held > limit:
            raise RequestError(429, "rate_limit_error", f"the session holds more than {limit} bytes")

    def _check_extendable(self, parent: Node) -> None:
        if parent.finish_reason == "length" and self.config.session_server.on_length == "refuse":
            message = "the answer before was cut by its length (session_server.on_length = refuse)"
            raise RequestError(409, "conflict_error", message, "messages")
