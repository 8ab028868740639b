"""`python -m router` as the supervisor starts it, on a real log server."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import aiohttp
import msgspec

from router.state import SERVICE
from segue.boot import Endpoints
from segue.config.schema import Config
from segue.events import work
from segue.log.writer import Writer
from segue.ports import free_port
from segue.testing.log_fixtures import LogServer


async def test_it_starts_obeys_and_ends_at_once_on_sigterm(tmp_path: Path) -> None:
    server = LogServer(tmp_path)
    await server.start()
    process = None
    url = f"http://127.0.0.1:{free_port()}"
    endpoints = Endpoints(
        log_url=server.url, router_url=url, session_urls=(), ray_address="", ray_temp_dir="", admin_token="a",
        worker_token="w",
    )  # fmt: skip
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(Config()))
    (tmp_path / "endpoints.json").write_bytes(msgspec.json.encode(endpoints))
    try:
        log = await server.open(tmp_path.name)
        async with await Writer.open(log, "controller") as writer:
            await writer.append(work.CloseAdmission(pause=1), targets=(SERVICE,))
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", "router", "--run-dir", str(tmp_path))
            async with asyncio.timeout(30):
                while not any(isinstance(r.body, work.AdmissionClosed) for r in await log.read(0, limit=100)):
                    await asyncio.sleep(0.05)
        async with aiohttp.ClientSession() as http, http.get(f"{url}/healthz") as response:
            assert response.status == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0
    finally:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        await server.close_logs()
        server.kill()
