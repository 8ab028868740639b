"""Every error leaves as an OpenAI-shaped body, an Anthropic-shaped one where that dialect is spoken; the one place that
knows which status stands for which class."""

from __future__ import annotations

import logging

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from segue.errors import BlobError, EngineError, EngineUnavailable, LogError, RequestError

RETRY_AFTER_S = 1
_logger = logging.getLogger(__name__)
_RETRYABLE = {408, 429, 502, 503, 504}
MESSAGES_PATH = "/v1/messages"
_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip
"""The vendor's own names, where it has one."""


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


def anthropic_error_body(error: RequestError) -> dict[str, object]:
    """The same in the shape of the Messages dialect."""
    told = {
        "type": _ANTHROPIC.get(error.status, error.kind), "message": error.message, "param": error.param,
        "retryable": error.status in _RETRYABLE,
    }  # fmt: skip
    return {"type": "error", "error": told, "request_id": None}


def error_response(error: RequestError, path: str = "") -> web.Response:
    """`path`: of the request; its dialect is the error's."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else None
    shape = anthropic_error_body if path.endswith(MESSAGES_PATH) else error_body
    return web.Response(
        status=error.status, body=orjson.dumps(shape(error)), content_type="application/json", headers=headers
    )


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        kind = {404: "not_found_error", 413: "request_too_large"}.get(error.status, "invalid_request_error")
        return error_response(RequestError(error.status, kind, error.reason), request.path)
    except ConnectionError:
        raise  # there is nobody left to answer
    except Exception as error:
        told = as_request_error(error)
        if told.status == 500:
            _logger.exception("%s %s", request.method, request.path)
        return error_response(told, request.path)
