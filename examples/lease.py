"""How an environment program works for segue: lease a rollout, play it, hand in its rewards. Copy it or import it.

The whole protocol: `POST {SEGUE_BASE_URL}/rollouts/lease` with the worker token answers 200 with a rollout, or 204 when
there is nothing to play right now. The rollout's session speaks the OpenAI chat API at `base_url` with `token`.
`POST /sessions/{id}/finish` hands in the rewards and may be repeated. A turn that a pause of the policy cuts just takes
longer to answer; a session that is gone (404, 410) is dropped: segue leases its rollout again.

Invariants: at most `concurrency` rollouts are open; one rollout's failure never ends the worker; SIGTERM does, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field

import httpx
import openai

log = logging.getLogger("environment")
EMPTY_WAIT_S = 0.1
"""Between questions while there is nothing to lease: short, because the policy idles until the first answer."""
MAX_WAIT_S = 5.0
TURN_TIMEOUT_S = 900.0
"""Longer than the server's own turn deadline, which answers 503 by itself."""
ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Lease:
    """One rollout to play. `group`: rollouts of one group play the same task; `purpose`: "train" or "eval"."""

    session_id: str
    token: str
    base_url: str
    purpose: str
    group: int


@dataclass(frozen=True, slots=True)
class Result:
    """What the environment thinks of the rollout: its reward, that of each turn, and "ok" or what went wrong."""

    reward: float
    per_turn: list[float]
    status: str = "ok"
    metadata: dict[str, str] = field(default_factory=dict)


Play = Callable[[Lease, openai.AsyncOpenAI], Awaitable[Result]]


class Worker:
    """Plays rollouts until it is cancelled. One HTTP client and one OpenAI client serve all of them."""

    def __init__(self, play: Play, base_url: str, token: str, concurrency: int, http: httpx.AsyncClient) -> None:
        self._play, self._base_url, self._http, self._concurrency = play, base_url.rstrip("/"), http, concurrency
        self._headers = {"Authorization": f"Bearer {token}"}
        self._name = f"{os.environ.get('SEGUE_WORKER', 'worker')}/{os.getpid()}"
        # Retries outlast a restart of the session server; it knows a repeated request and answers it only once.
        self._openai = openai.AsyncOpenAI(
            api_key="-", base_url=base_url, http_client=http, max_retries=10, timeout=TURN_TIMEOUT_S
        )

    async def run(self) -> None:
        slots = asyncio.Semaphore(self._concurrency)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await slots.acquire()
                lease = await self._lease()
                tasks.create_task(self._rollout(lease)).add_done_callback(lambda _: slots.release())

    async def _lease(self) -> Lease:
        wait_s = EMPTY_WAIT_S
        while True:
            answer = await self._ask(f"{self._base_url}/rollouts/lease", {"worker": self._name}, self._headers)
            if answer is not None and answer.status_code == 200:
                body = answer.json()
                return Lease(*(body[name] for name in ("session_id", "token", "base_url", "purpose", "group")))
            if answer is not None and answer.status_code not in (204, 429, 503):
                raise RuntimeError(f"lease refused: {answer.status_code} {answer.text[:300]}")
            if answer is None or answer.status_code != 204:
                wait_s = min(2 * wait_s, MAX_WAIT_S)
            await asyncio.sleep(wait_s)

    async def _rollout(self, lease: Lease) -> None:
        client = self._openai.with_options(base_url=lease.base_url, api_key=lease.token)
        try:
            result = await self._play(lease, client)
        except openai.APIStatusError as error:
            if error.status_code in (404, 410):
                log.info("session %s is gone", lease.session_id)
                return
            result = Result(0.0, [], f"failed: {error.status_code}")
        except openai.APIConnectionError as error:
            result = Result(0.0, [], f"failed: {error}")
        await self._finish(lease, result)

    async def _finish(self, lease: Lease, result: Result) -> None:
        url = f"{self._base_url}/sessions/{lease.session_id}/finish"
        wait_s = EMPTY_WAIT_S
        while True:
            answer = await self._ask(url, asdict(result), {"Authorization": f"Bearer {lease.token}"})
            if answer is not None and answer.status_code < 500:
                if answer.is_client_error:
                    log.warning("finish of %s: %d %s", lease.session_id, answer.status_code, answer.text[:300])
                return
            wait_s = min(2 * wait_s, MAX_WAIT_S)
            await asyncio.sleep(wait_s)

    async def _ask(self, url: str, body: dict[str, object], headers: dict[str, str]) -> httpx.Response | None:
        """The answer, or None if the server could not be reached."""
        try:
            return await self._http.post(url, json=body, headers=headers, timeout=ASK_TIMEOUT_S)
        except httpx.TransportError as error:
            log.info("%s does not answer: %r", url, error)
            return None


async def _work(play: Play) -> None:
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    concurrency = int(os.environ.get("SEGUE_CONCURRENCY", "16"))
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=concurrency + 2)) as http:
        worker = Worker(play, os.environ["SEGUE_BASE_URL"], os.environ["SEGUE_WORKER_TOKEN"], concurrency, http)
        await worker.run()


def main(play: Play) -> int:
    """Run a worker configured by SEGUE_BASE_URL, SEGUE_WORKER_TOKEN and SEGUE_CONCURRENCY until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_work(play))
    return 0
