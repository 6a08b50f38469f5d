"""One connection in ten is cut at a random byte, either way, while clients talk and retry: nothing lost, nothing twice.

`MEMORA_TEST_SECONDS` makes it longer and `MEMORA_TEST_SEED` another one.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress

import httpx2
import openai
from cutting_proxy import Cut, CuttingProxy, Plan
from openai import AsyncOpenAI
from serving import Serving, ask, stream_events, text_of
from talk import caught_up, folds_of, worker_beside

SECONDS = float(os.environ.get("MEMORA_TEST_SECONDS", "6"))
SEED = int(os.environ.get("MEMORA_TEST_SEED", "20261130"))
CUT_SHARE = 0.1
CONVERSATIONS = 8
MOST_TRIES = 12
"""Of one turn: that so many connections in a row are cut does not happen by chance."""

LARGEST_REQUEST, LARGEST_REPLY = 900, 4_000
"""About what a request and a streamed reply of these tests take on the wire."""


def weather(seed: int) -> Plan:
    """What happens to each connection: the same for the same seed."""
    dice = random.Random(seed)

    def next_connection() -> Cut | None:
        if dice.random() >= CUT_SHARE:
            return None
        if dice.random() < 0.3:
            return Cut(dice.randrange(LARGEST_REQUEST), "request")
        return Cut(dice.randrange(LARGEST_REPLY), "reply")

    return next_connection


async def test_histories_equal_the_ledgers_of_the_clients(serving: Serving) -> None:
    """Every turn a client was told of is in the history, once, in its order, with the answer that the client saw."""
    deadline = asyncio.get_running_loop().time() + SECONDS
    ledgers: dict[str, list[tuple[str, str]]] = {}
    proxy = CuttingProxy(serving.port, weather(SEED))

    async def one_client(number: int) -> None:
        # A connection of its own for each try, or one that lives would be used for ever.
        options = {"default_headers": {"connection": "close"}, "max_retries": 0 if number % 2 else MOST_TRIES}
        async with serving.client() as calm, serving.client(proxy.port, **options) as client:
            conversation = (await calm.conversations.create()).id
            ledger = ledgers.setdefault(conversation, [])
            while asyncio.get_running_loop().time() < deadline:
                text = f"I am client {number} and this is fact {len(ledger)}."
                if number % 2:
                    answer = await _with_a_key(client, text, conversation, f"{number}-{len(ledger)}")
                else:  # a simple program: one plain call, which the client repeats by itself
                    answer = await ask(client, text, conversation)
                ledger.append((text, answer))

    async with proxy, worker_beside(serving.memora):
        async with asyncio.TaskGroup() as clients:
            for number in range(CONVERSATIONS):
                clients.create_task(one_client(number))
        await caught_up(serving.memora, *ledgers)
    assert proxy.cuts > CUT_SHARE / 2 * proxy.connections, f"{proxy.cuts} of {proxy.connections} connections were cut"
    assert all(ledgers.values())
    for conversation, ledger in ledgers.items():
        assert await serving.turns(conversation) == ledger
        folds = await folds_of(serving.memora, conversation)
        assert [fold.start for fold in folds] == [0, *(fold.end for fold in folds)][: len(folds)]


async def _with_a_key(client: AsyncOpenAI, text: str, conversation: str, key: str) -> str:
    """A careful program: streams, and sends its own key again until it has seen the end."""
    for _ in range(MOST_TRIES):
        with suppress(openai.APIConnectionError, httpx2.TransportError):
            events = await stream_events(client, text, conversation, extra_headers={"Idempotency-Key": key})
            if events and events[-1].type == "response.completed":
                assert text_of(events) == events[-1].response.output_text
                return text_of(events)
    raise AssertionError(f"no answer after {MOST_TRIES} tries")
