"""The receiver's side of a sync as a context: one begin, one end, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from segue.errors import SegueError
from training.weight_sync.protocol import Receiver, TornSyncError

END_TIMEOUT_S = 30.0
"""For the closing call after a failure: an engine that does not answer by then is dead anyway."""


async def each(receivers: tuple[Receiver, ...], call: Callable[[Receiver], Awaitable[None]], timeout_s: float) -> None:
    """Run `call` on all receivers at once, bounded; the first error cancels the rest and is raised plainly."""

    async def one(receiver: Receiver) -> None:
        await call(receiver)

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(receiver)) for receiver in receivers]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    for task in tasks:
        task.result()  # a task group takes a task that was cancelled from inside for a finished one


@contextlib.asynccontextmanager
async def torn_on_error(version: int) -> AsyncIterator[None]:
    """Turns any failure inside into TornSyncError; cancellation passes through."""
    try:
        yield
    except (SegueError, OSError, TimeoutError) as error:
        raise TornSyncError(
            f"sync of version {version} failed half way: {str(error) or type(error).__name__}"
        ) from error


@contextlib.asynccontextmanager
async def weight_update(receivers: tuple[Receiver, ...], version: int, timeout_s: float) -> AsyncIterator[None]:
    """begin ... end on every receiver. After a failure the update is closed too, so that a repeated sync can begin."""
    async with torn_on_error(version):
        try:
            await each(receivers, lambda receiver: receiver.begin(), timeout_s)
            yield
        except BaseException:
            for receiver in receivers:
                with contextlib.suppress(SegueError, OSError, TimeoutError):
                    async with asyncio.timeout(END_TIMEOUT_S):
                        await receiver.end()
            raise
        await each(receivers, lambda receiver: receiver.end(), timeout_s)
