"""The least that a proxy in Python does: aiohttp on both sides, both bodies through orjson, nothing kept.

python benchmarks/rivals/bare_proxy.py --engine URL --port P
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator

import aiohttp
import orjson
from aiohttp import web

HTTP = web.AppKey("http", aiohttp.ClientSession)
_JSON = {"Content-Type": "application/json"}


def make_app(engine: str) -> web.Application:
    async def hop(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        async with request.app[HTTP].post(engine + request.path, data=orjson.dumps(body), headers=_JSON) as answer:
            data = orjson.loads(await answer.read())
            return web.Response(status=answer.status, body=orjson.dumps(data), content_type="application/json")

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def client(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            app[HTTP] = http
            yield

    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(client)
    app.add_routes([web.post("/generate", hop), web.post("/v1/chat/completions", hop), web.get("/healthz", health)])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    web.run_app(make_app(options.engine), host="127.0.0.1", port=options.port, access_log=None, print=None)
