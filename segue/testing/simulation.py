"""A whole distributed run in one thread: simulated time, and processes that can be killed between any two steps.

`SimulatedLoop` is an event loop whose clock jumps to the next timer whenever nothing else can happen, so hours pass in
the time that their work takes. Sockets are real (loopback); work for threads is done at once, on the loop's thread,
because time must not jump while it runs. The order of events is that of the loop alone.

A `Process` is what runs in one context: its tasks, callbacks and sockets. `kill()` is SIGKILL: nothing of it runs ever
again, no `finally`, no callback, and its peers see their connections reset. What it wrote to files and to the log
stays; what it had in memory is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import logging
import selectors
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

from segue.errors import SegueError

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_EPOCH_S = 1_700_000_000.0
_STUCK_S = 10.0
"""Real seconds without a timer, a ready task or an answer of anything outside: nothing will ever happen again."""
_RESET = struct.pack("ii", 1, 0)


class SimulationStuck(SegueError):
    """Every task waits for something that no timer and no other task will bring about."""


class Process:
    """A part of the simulation that lives and dies as a whole. Start things with `start`."""

    def __init__(self, loop: SimulatedLoop, name: str) -> None:
        self.name, self.dead = name, False
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self)
        self._sockets: list[socket.socket] = []
        self._main: asyncio.Task[Any] | None = None
        self.ended: asyncio.Future[BaseException | None] = loop.create_future()
        """Resolved when `main` has ended by itself or the process was killed: its error, if it had one."""

    def start(self, main: Coroutine[Any, Any, Any]) -> None:
        self._main = self._loop.create_task(main, name=self.name, context=self._context)
        self._main.add_done_callback(self._ended, context=self._context)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not self.ended.done():
            self.ended.set_result(None if task.cancelled() else task.exception())

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self.dead:
            return
        self.dead = True
        for task in asyncio.all_tasks(self._loop):
            if task.get_context().get(_PROCESS) is self:
                # Collecting it would run its `finally` blocks: what is killed must never run again.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
                task._log_destroy_pending = False  # type: ignore[attr-defined]
        for one in self._sockets:
            self._loop.forget(one)
        self._sockets.clear()
        if not self.ended.done():
            self.ended.set_result(None)

    def own(self, one: socket.socket) -> None:
        self._sockets.append(one)


async def die_if_killed() -> None:
    """Never returns in a process that is dead: what it was about to do next does not happen."""
    process = _PROCESS.get()
    if process is not None and process.dead:
        await asyncio.get_running_loop().create_future()


class _Jump(selectors.DefaultSelector):
    """Asks the real selector without waiting; where nothing is ready, time moves on instead."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            ready = super().select(_STUCK_S)
            if not ready:
                raise SimulationStuck("no timer, no ready task, no input: the simulation cannot go on")
            return ready
        # What was just sent over the loopback is there by the next question.
        ready = super().select(0)
        if not ready:
            self.loop.jump(timeout)
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now_s = 0.0
        selector = _Jump()
        super().__init__(selector)
        selector.loop = self
        self.jumps = 0

    def time(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return _EPOCH_S + self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += max(seconds, 0.0)
        self.jumps += 1

    def process(self, name: str) -> Process:
        return Process(self, name)

    # --- what belongs to a dead process does not run -------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(_while_alive, process, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, _while_alive, process, callback, *args, context=context)

    # --- sockets ------------------------------------------------------------------------------------------------

    def _make_socket_transport(self, sock: socket.socket, *args: Any, **options: Any) -> Any:
        process = _PROCESS.get()
        if process is not None:
            process.own(sock)
        return super()._make_socket_transport(sock, *args, **options)  # type: ignore[misc]

    def _start_serving(self, protocol_factory: Any, sock: socket.socket, *args: Any, **options: Any) -> Any:
        process = _PROCESS.get()
        if process is not None:
            process.own(sock)
        return super()._start_serving(protocol_factory, sock, *args, **options)  # type: ignore[misc]

    def forget(self, one: socket.socket) -> None:
        """Close a dead process's socket under its transport: the peer sees a reset."""
        number = one.fileno()
        if number < 0:
            return
        self._remove_reader(number)  # type: ignore[attr-defined]
        self._remove_writer(number)  # type: ignore[attr-defined]
        transport = self._transports.pop(number, None)  # type: ignore[attr-defined]
        if transport is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(transport))
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        one.close()

    # --- threads ------------------------------------------------------------------------------------------------

    def run_in_executor[*Ts, T](self, executor: object, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Done at once, on this thread."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def _while_alive(process: Process, callback: Callable[..., Any], *args: Any) -> None:
    if not process.dead:
        callback(*args)


@contextlib.contextmanager
def simulation() -> Iterator[SimulatedLoop]:
    """A simulated loop; `time.time` and `time.monotonic` follow it while the block runs, and nothing is logged: what is
    killed a thousand times would complain a thousand times."""
    loop, level = SimulatedLoop(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with mock.patch.object(time, "time", loop.wall_s), mock.patch.object(time, "monotonic", loop.time):
        try:
            yield loop
        finally:
            logging.disable(level)
            loop.close()


def simulate[T](main: Callable[[SimulatedLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main(loop)` in a simulation of its own."""
    with simulation() as loop:
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(main(loop))
        finally:
            asyncio.set_event_loop(None)
