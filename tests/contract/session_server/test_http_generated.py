"""Generated requests over the OpenAPI document: whatever they hold, no 5xx of ours, and nobody else notices.

SEGUE_HTTP_EXAMPLES says how many requests each route gets (50 unless told otherwise).
"""

from __future__ import annotations

import asyncio
import os

import hypothesis
import pytest
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from session_server_rig import text_of

from session_server.surface import ROUTES

EXAMPLES = int(os.environ.get("SEGUE_HTTP_EXAMPLES", "50"))
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ENDS_A_SESSION = ("/finish", "DELETE")


class Fuzzer:
    """Sends the generated requests from a thread of its own; opens sessions as routes use them up."""

    def __init__(self, url: str) -> None:
        self.url, self.http, self.sent = url, requests.Session(), 0
        self.session: dict[str, str] = {}

    def staff(self, method: str, path: str, **body: object) -> requests.Response:
        return self.http.request(method, self.url + path, json=body, headers={"Authorization": "Bearer admin"})

    def open(self) -> dict[str, str]:
        if self.session:
            self.staff("DELETE", f"/sessions/{self.session['session_id']}")
        self.session = self.staff("POST", "/sessions", purpose="serve").json()
        body = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 2}
        assert self.staff("POST", f"/sessions/{self.session['session_id']}/v1/chat/completions", **body).ok
        return self.session

    def send(self, case: schemathesis.Case, ends: bool) -> None:
        self.sent += 1
        token = "worker"
        if "id" in (case.path_parameters or {}) and self.sent % 5:
            session = self.session if self.session and not ends and self.sent % 20 else self.open()
            case.path_parameters["id"] = session["session_id"]
            token = session["token"]
        if case.path.endswith("/events"):
            case.query["follow"] = "false"
        if case.path.endswith("/lease") and isinstance(case.body, dict) and "wait_s" in case.body:
            case.body["wait_s"] = 0.01
        head = {} if self.sent % 17 == 0 else {"Authorization": f"Bearer {token}"}
        response = case.call(base_url=self.url, session=self.http, headers=head, timeout=20)
        case.validate_response(response, checks=CHECKS)
        if ends:
            self.session = {}


def fuzz(fuzzer: Fuzzer, operation: object, mode: GenerationMode, examples: int) -> None:
    ends = any(mark in f"{operation.method.upper()} {operation.path}" for mark in ENDS_A_SESSION)

    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate], derandomize=examples <= 50,
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def each(case: schemathesis.Case) -> None:
        fuzzer.send(case, ends)

    each()


@pytest.mark.slow
@pytest.mark.timeout(60 + 12 * EXAMPLES)
async def test_generated_requests_find_no_fault_of_ours(rig_of, engine):
    async with rig_of(engine) as rig:
        bystander = await rig.open()
        said = text_of(await bystander.chat("w1", max_tokens=4))
        document = await rig.call("GET", "/openapi.json")
        schema = schemathesis.openapi.from_dict(document)
        fuzzer, seen = Fuzzer(rig.url), 0
        for result in schema.get_all_operations():
            operation = result.ok()
            takes = operation.body or operation.query
            modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if takes else [GenerationMode.POSITIVE]
            for mode in modes:
                share = max(1, EXAMPLES // len(modes))
                await asyncio.to_thread(fuzz, fuzzer, operation, mode, share)
            seen += 1
            await bystander.chat("w1", said, f"w{2 + seen}", max_tokens=4)
        assert seen == len(ROUTES)
        turns = (await bystander.view())["turns"]
        assert len(turns) == 1 + seen
        assert {turn["parent_id"] for turn in turns[1:]} == {turns[0]["turn_id"]}
        ready = await rig.call("GET", "/readyz")
        assert (ready["status"], ready["sessions"] <= 2 + EXAMPLES) == ("ready", True)
