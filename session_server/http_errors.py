"""Every error leaves as an OpenAI-shaped body; the one place that knows which status stands for which class."""

from __future__ import annotations

import logging

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from segue.errors import BlobError, EngineError, EngineUnavailable, LogError, RequestError

RETRY_AFTER_S = 1
_logger = logging.getLogger(__name__)
_RETRYABLE = {429, 502, 503, 504}


def as_request_error(error: Exception) -> RequestError:
    """What a client is told about `error`."""
    match error:
        case RequestError():
            return error
        case EngineUnavailable():
            return RequestError(504, "engine_error", str(error))
        case EngineError():
            return RequestError(502, "engine_error", str(error))
        case LogError():
            return RequestError(503, "server_error", f"the log: {error}")
        case BlobError():
            return RequestError(507, "server_error", str(error))
        case TimeoutError():
            return RequestError(504, "server_error", "a deadline passed")
        case _:
            return RequestError(500, "server_error", "internal error")


def error_body(error: RequestError) -> dict[str, object]:
    retryable = error.status in _RETRYABLE
    return {
        "error": {
            "type": error.kind, "message": error.message, "param": error.param, "code": error.kind,
            "retryable": retryable,
        }
    }  # fmt: skip


def error_response(error: RequestError) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else None
    return web.Response(
        status=error.status, body=orjson.dumps(error_body(error)), content_type="application/json", headers=headers
    )


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        kind = {404: "not_found_error", 413: "request_too_large"}.get(error.status, "invalid_request_error")
        return error_response(RequestError(error.status, kind, error.reason))
    except Exception as error:
        told = as_request_error(error)
        if told.status == 500:
            _logger.exception("%s %s", request.method, request.path)
        return error_response(told)
