"""The offline model's chances: how long it takes, and how often it fails, the same for the same seed."""

from __future__ import annotations

import time
from itertools import pairwise

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from memora.offline_model import OfflineModel
from memora.offline_model.behaviour import FAILURES, Behaviour
from memora.offline_model.call import Call


def client_of(url: str) -> AsyncOpenAI:
    """The official client."""
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def asked(text: str) -> Call:
    """A request for an answer."""
    return Call("answer", messages=(("user", text),))


@given(
    st.builds(
        Behaviour,
        first_seconds=st.floats(0, 10),
        reply_seconds=st.floats(0, 10),
        summary_seconds=st.floats(0, 10),
        jitter=st.floats(0, 1),
        seed=st.integers(),
    ),
    st.text(),
    st.integers(0, 100),
)
def test_delays_stay_within_their_spread(behaviour: Behaviour, text: str, pieces: int) -> None:
    """An answer begins and ends, and a summary comes, at its mean time ± the jitter, the same for the same request."""
    low, high = 1 - behaviour.jitter, 1 + behaviour.jitter
    timing = behaviour.timing(asked(text), pieces)
    assert timing == behaviour.timing(asked(text), pieces)
    assert behaviour.first_seconds * low - 1e-9 <= timing.first_seconds <= behaviour.first_seconds * high + 1e-9
    whole = timing.first_seconds + timing.piece_seconds * max(pieces - 1, 0)
    assert whole <= max(behaviour.first_seconds, behaviour.reply_seconds) * high + 1e-9
    if pieces > 1:
        assert whole >= max(behaviour.reply_seconds * low, timing.first_seconds) - 1e-9
    summary = behaviour.timing(Call("summary", messages=(("user", text),)), pieces)
    assert behaviour.summary_seconds * low - 1e-9 <= summary.first_seconds <= behaviour.summary_seconds * high + 1e-9
    assert not summary.piece_seconds


def test_delays_differ_and_are_centred() -> None:
    """A thousand requests take a thousand times, half of them longer than the mean; another seed changes them."""
    means = Behaviour(first_seconds=1.0, jitter=0.3)
    firsts = [means.timing(asked(str(number)), 2).first_seconds for number in range(1_000)]
    assert len(set(firsts)) == 1_000
    assert min(firsts) < 0.72
    assert max(firsts) > 1.28
    assert sum(firsts) / 1_000 == pytest.approx(1.0, abs=0.02)
    other = Behaviour(first_seconds=1.0, jitter=0.3, seed=2)
    assert other.timing(asked("1"), 2) != means.timing(asked("1"), 2)


def test_the_share_that_fails_is_the_one_asked_for() -> None:
    """About so many of a thousand requests, in every way there is."""
    behaviour = Behaviour(failing_share=0.2)
    failures = [behaviour.failure(asked(str(number))) for number in range(1_000)]
    happened = [each for each in failures if each is not None]
    assert 150 < len(happened) < 250
    assert {str(each) for each in happened} == {str(each) for each in FAILURES}
    assert Behaviour().failure(asked("1")) is None


async def test_pieces_come_when_the_behaviour_says() -> None:
    """The first after its time, the others evenly until the end; not streamed, all of it takes as long."""
    behaviour = Behaviour(first_seconds=0.2, reply_seconds=0.5)
    async with OfflineModel(scriptable=True, behaviour=behaviour) as model, client_of(model.url) as client:
        model.add_fault({"kind": "text", "text": "one two three four"})
        began = time.monotonic()
        async with await client.responses.create(model="m", input="x", stream=True) as stream:
            times = [time.monotonic() - began async for event in stream if event.type == "response.output_text.delta"]
        assert times[0] >= 0.2
        assert times[-1] >= 0.5
        assert all(after - before >= 0.05 for before, after in pairwise(times))
        began = time.monotonic()
        await client.responses.create(model="m", input="x")
        assert time.monotonic() - began >= 0.5


async def test_what_fails_by_chance_fails_once() -> None:
    """Who asks the same again is answered; the model says how many requests have failed."""
    behaviour = Behaviour(failing_share=1.0, seed=3)
    async with OfflineModel(behaviour=behaviour) as model, client_of(model.url) as client:
        assert await failures_of(model) == 0
        for number in range(8):
            with pytest.raises((APIStatusError, APIConnectionError)):
                await client.responses.create(model="m", input=f"x{number}")
            assert (await client.responses.create(model="m", input=f"x{number}")).output_text
        assert await failures_of(model) == 8


async def failures_of(model: OfflineModel) -> int:
    """How many requests failed by chance."""
    async with httpx2.AsyncClient(verify=False) as client:
        return int((await client.get(f"{model.url.removesuffix('/v1')}/_control/failures")).json()["failures"])
