"""The OpenAPI 3.1 document of the session server, made of its route table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from session_server.bodies import AnthropicError, Error, schemas
from session_server.http_errors import MESSAGES_PATH
from session_server.routes import Route

_MEANINGS = {
    204: "Nothing to give", 400: "Malformed, or a field that cannot be honoured", 401: "No token, or a wrong one",
    403: "A token of another kind", 404: "There never was such a session", 408: "The body did not come in time",
    409: "Conflicts with what is there", 410: "The session is over", 413: "Too large",
    422: "No sample can be made; says which token", 429: "Over budget", 502: "The engine answered wrongly",
    503: "Paused beyond the turn's deadline, or not able to record", 504: "No answer within the deadline",
    507: "No room for bulk bytes",
}  # fmt: skip
_OF_CALLER = {"anyone": (), "staff": (401,), "worker": (401, 403), "session": (401, 403, 404, 410, 502)}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document as JSON values."""
    types = {t for r in routes for t in (r.takes, r.gives, r.query) if isinstance(t, type)} | {Error, AnthropicError}
    ordered = sorted(types, key=lambda t: t.__name__)
    references, components = schemas(ordered)
    by_type = dict(zip(ordered, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "segue session server", "version": "1",
            "description": "Sessions that environments play by HTTP, kept exact to the token.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }  # fmt: skip


def _operation(route: Route, by_type: dict[type, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": route.summary,
        "description": " ".join((route.handle.__doc__ or "").split()),
        "responses": _responses(route, by_type),
    }
    if route.caller != "anyone":
        operation["security"] = [{"bearer": []}, {"apiKey": []}]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    if route.query is not None:
        properties = components[route.query.__name__]["properties"]
        parameters += [{"name": n, "in": "query", "required": False, "schema": s} for n, s in properties.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.takes is not None:
        content = {"application/json": {"schema": by_type[route.takes]}}
        required = bool(components[route.takes.__name__].get("required"))
        operation["requestBody"] = {"required": required, "content": content}
    return operation


def _responses(route: Route, by_type: dict[type, Any]) -> dict[str, Any]:
    success: dict[str, Any] = {}
    if isinstance(route.gives, type):
        success["application/json"] = {"schema": by_type[route.gives]}
    elif route.gives is not None:
        success[route.gives] = {}
    if route.streams:
        success["text/event-stream"] = {}
    responses: dict[str, Any] = {}
    if success:
        responses["200"] = {"description": "As asked", "content": success}
    statuses = {*route.statuses, *_OF_CALLER[route.caller]}
    if route.takes is not None or route.query is not None:
        statuses |= {400}
    if route.takes is not None:
        statuses |= {408, 413}
    if route.over != 410:
        statuses = statuses - {410} | {route.over}
    shape = by_type[AnthropicError if route.path.endswith(MESSAGES_PATH) else Error]
    for status in sorted(statuses):
        told: dict[str, Any] = {"description": _MEANINGS[status]}
        if status == 503 and isinstance(route.gives, type) and route.caller == "anyone":
            told["content"] = success
        elif status >= 400:
            told["content"] = {"application/json": {"schema": shape}}
        responses[str(status)] = told
    return responses
