"""The OpenAPI document: valid, complete, and in step with the written description."""

from __future__ import annotations

import re
from pathlib import Path

from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from session_server.surface import ROUTES

DOCS = Path(__file__).parents[3] / "docs" / "session_server.md"


async def test_the_document_is_valid_and_names_every_route(rig_of, engine):
    async with rig_of(engine) as rig:
        document = await rig.call("GET", "/openapi.json", token="")
    assert [error.message for error in OPENAPI_31_VALIDATOR.iter_errors(document)] == []
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert told == {(route.method, route.path) for route in ROUTES}
    names = [method["operationId"] for methods in document["paths"].values() for method in methods.values()]
    assert len(set(names)) == len(names)
    assert all(method["description"] for methods in document["paths"].values() for method in methods.values())


async def test_every_route_needs_the_token_that_it_says(rig_of, engine):
    async with rig_of(engine) as rig:
        session = await rig.open()
        for route in ROUTES:
            path = route.path.replace("{id}", session.opened["session_id"])
            if route.caller != "anyone":
                error = await rig.call(route.method, path, {}, token="nobody", status=401)
                assert (error.get("error") or error)["type"] == "authentication_error"


def test_the_written_description_names_exactly_these_routes():
    told = set(re.findall(r"`(GET|POST|DELETE) (/[^ `?]*)`", DOCS.read_text()))
    assert told == {(route.method, route.path) for route in ROUTES}
