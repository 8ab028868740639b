"""One turn being generated, shared by everybody who waits for it: its first client and that client's retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from session_server.graph import Node
from session_server.messages import Comparison, Message
from session_server.sampling import Sampling
from session_server.sessions import Session


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A validated request for one turn.

    parent: the node it attaches to; messages: the request's messages after that node's; prompt: int32, the tokens that
    the turn adds before its output; max_new_tokens: bound that the server holds to, over all parts together.
    """

    session: Session
    parent: Node | None
    context: str
    comparison: Comparison
    messages: tuple[Message, ...]
    prompt: NDArray[np.int32]
    sampling: Sampling
    max_new_tokens: int
    tools: bool
    digest: str
    idempotency_key: str
    stream: bool


@dataclass(slots=True, eq=False)
class Attempt:
    """`output` grows while the engine streams; `changed` is set (and replaced) at each growth and at the end."""

    turn_id: str
    ask: Ask
    done: asyncio.Future[Node]
    deadline_s: float
    """On the event loop's clock."""
    output: list[int] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    watchers: list[Callable[[], bool]] = field(default_factory=list)
    """One for each client that waits for the answer: whether it is still connected."""
    task: asyncio.Task[None] | None = None
    cancelled_as: str = ""
    """Why the server itself gave it up (session deleted, finished, expired)."""

    @property
    def awaited(self) -> bool:
        """Whether a client that would get the answer is still there."""
        return any(connected() for connected in self.watchers)

    def progress(self, output: list[int]) -> None:
        self.output = output
        self._notify()

    def cancel(self, reason: str) -> None:
        self.cancelled_as = self.cancelled_as or reason
        if self.task is not None:
            self.task.cancel()

    def finish(self, node: Node) -> None:
        if not self.done.done():
            self.done.set_result(node)
            self._notify()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # nobody may be waiting any more
            self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
