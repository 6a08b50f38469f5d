"""What `/openapi.json` says is true: generated requests, no 5xx, no undocumented status."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import anyio.to_thread
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from serving import KEY, Serving, ask

SECONDS = float(os.environ.get("MEMORA_TEST_SECONDS", "12"))
SEED = 7
BATCH, MOST_BATCHES = 10, 1_000
USUAL = hypothesis_settings(
    max_examples=BATCH,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
ENDLESS = "/events"


def run_all(serving: Serving, conversation: str, seconds: float) -> dict[str, int]:
    """Generated requests for every operation within a time; how many each got."""
    schema = schemathesis.openapi.from_url(f"{serving.root}/openapi.json")
    found = list(schema.get_all_operations())
    operations = [operation.ok() for operation in found if isinstance(operation, Ok)]
    assert len(operations) == len(found)
    share = seconds / len(operations)
    return {operation.label: _run(operation, conversation, share) for operation in operations}


def _run(operation: Any, conversation: str, seconds: float) -> int:
    """Half of the requests are about a conversation that is there."""
    deadline = time.monotonic() + seconds
    dice = random.Random(SEED)
    sent = 0

    def send(case: Any) -> None:
        nonlocal sent
        names = [name for name in case.path_parameters if name == "conversation_id"]
        if names and ENDLESS not in operation.path and operation.method.upper() != "DELETE" and dice.random() < 0.5:
            case.path_parameters[names[0]] = conversation
        sent += 1
        response = case.call(headers={"authorization": f"Bearer {KEY}"}, timeout=10)
        case.validate_response(response, checks=CHECKS)

    for batch in range(MOST_BATCHES):
        # Hypothesis has no way to stop by the clock, so that it generates a few requests at a time.
        seed(SEED + batch)(USUAL(given(case=operation.as_strategy())(send)))()
        if time.monotonic() > deadline:
            break
    return sent


async def test_generated_requests_meet_only_what_is_documented(serving: Serving) -> None:
    """Every operation of the schema was really asked, and a conversation that was there still works."""
    async with serving.client() as client:
        conversation = (await client.conversations.create()).id
        await ask(client, "I live in Taipei.", conversation)
        sent = await anyio.to_thread.run_sync(run_all, serving, conversation, SECONDS)
        assert len(sent) > 10
        assert all(sent.values()), sent
        assert await ask(client, "Where do I live?", conversation)


async def test_the_documentation_lists_every_call_of_the_contract(serving: Serving) -> None:
    """A reader of `/openapi.json` finds all of it."""
    async with serving.http() as http:
        paths = (await http.get(f"{serving.root}/openapi.json")).json()["paths"]
    found = {(method, path.split("{")[0].rstrip("/")) for path, methods in paths.items() for method in methods}
    for call in (
        ("post", "/v1/responses"),
        ("get", "/v1/responses"),
        ("post", "/v1/responses/input_tokens"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/conversations"),
        ("get", "/v1/conversations"),
        ("delete", "/v1/conversations"),
        ("get", "/v1/models"),
    ):
        assert call in found
    rest = {path.rsplit("}", 1)[-1] for path in paths if path.startswith("/v1/conversations/{")}
    assert {"/items", "/memory", "/context"} <= rest
