"""How an environment program works for segue: lease a rollout, play it, hand in its rewards. Copy it or import it.

The whole protocol: `POST {SEGUE_BASE_URL}/rollouts/lease` with the worker token waits for a rollout (200) or says that
there is nothing to play (204). The rollout's session speaks the OpenAI chat API at `base_url` with `token`.
`POST /sessions/{id}/finish` hands in the rewards, `DELETE /sessions/{id}` gives up. A turn that a pause of the policy
cuts just takes longer to answer; a session that is gone (404, 410) is dropped, segue leases its rollout again.

Invariants: at most `concurrency` rollouts are open; a rollout that fails never ends the worker; SIGTERM does, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import openai

log = logging.getLogger("environment")
LEASE_WAIT_S = 20.0
ASK_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 900.0
"""Longer than the server's own turn deadline, which answers 503 by itself."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Lease:
    """One rollout to play. Rollouts of one `group` play the same task, drawn by `seed`; purpose: "train" | "eval"."""

    session_id: str
    token: str
    base_url: str
    purpose: str
    group: int
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """`reward` of the rollout (None: the mean of its turns) and, if the run's advantage wants them, of each turn."""

    reward: float | None = None
    per_turn: tuple[float, ...] | None = None


Play = Callable[[Lease, openai.AsyncOpenAI], Awaitable[Result]]


class Worker:
    """Plays rollouts until it is cancelled. One HTTP client and one OpenAI client serve all of them."""

    def __init__(self, play: Play, base_url: str, token: str, concurrency: int, http: httpx.AsyncClient) -> None:
        self._play, self._base_url, self._http, self._concurrency = play, base_url.rstrip("/"), http, concurrency
        self._headers = {"Authorization": f"Bearer {token}"}
        # A worker of the same name and another mark after the slash tells the server that the earlier one is gone.
        self._name = f"{os.environ.get('SEGUE_WORKER', 'worker')}/{secrets.token_hex(4)}"
        # Retries outlast a restart of the session server, which answers a repeated request without generating again.
        self._openai = openai.AsyncOpenAI(
            api_key=token, base_url=base_url, http_client=http, max_retries=10, timeout=TURN_TIMEOUT_S
        )

    async def run(self) -> None:
        slots = asyncio.Semaphore(self._concurrency)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await slots.acquire()
                tasks.create_task(self._rollout(await self._lease())).add_done_callback(lambda _: slots.release())

    async def _lease(self) -> Lease:
        body = {"worker": self._name, "wait_s": LEASE_WAIT_S}
        while True:
            answer = await self._ask("POST", "/rollouts/lease", self._headers, body)
            if answer.status_code == 200:
                given = answer.json()
                return Lease(*(given[name] for name in Lease.__slots__))
            if answer.status_code != 204:
                raise RuntimeError(f"no lease: {answer.status_code} {answer.text[:300]}")

    async def _rollout(self, lease: Lease) -> None:
        session, headers = f"/sessions/{lease.session_id}", {"Authorization": f"Bearer {lease.token}"}
        try:
            result = await self._play(lease, self._openai.with_options(base_url=lease.base_url, api_key=lease.token))
        except Exception as error:  # of whatever kind: a failed rollout is a fact about it, not the worker's end
            if not (isinstance(error, openai.APIStatusError) and error.status_code in (404, 410)):
                log.exception("rollout %s failed", lease.session_id)
                await self._ask("DELETE", session, headers)
            return
        body = {"status": "ok", "reward": result.reward, "per_turn": result.per_turn}
        answer = await self._ask("POST", f"{session}/finish", headers, body)
        if answer.is_error:
            log.warning("finish of %s: %d %s", lease.session_id, answer.status_code, answer.text[:300])

    async def _ask(self, method: str, path: str, headers: dict[str, str], body: object = None) -> httpx.Response:
        """The answer; asks again while the server is away or busy. Every request here may be repeated."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                answer = await self._http.request(
                    method, self._base_url + path, json=body, headers=headers, timeout=ASK_TIMEOUT_S
                )
                if answer.status_code < 500 and answer.status_code != 429:
                    return answer
            except httpx.TransportError as error:
                log.info("%s does not answer: %r", path, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _work(play: Play) -> None:
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    concurrency = int(os.environ.get("SEGUE_CONCURRENCY", "16"))
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=concurrency + 2)) as http:
        await Worker(play, os.environ["SEGUE_BASE_URL"], os.environ["SEGUE_WORKER_TOKEN"], concurrency, http).run()


def main(play: Play) -> int:
    """Run a worker as SEGUE_BASE_URL, SEGUE_WORKER_TOKEN and SEGUE_CONCURRENCY say, until SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s: %(message)s")
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_work(play))
    return 0
