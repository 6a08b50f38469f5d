"""The fold job: its name, and JSON that is nothing but JSON."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress
from typing import Any

import pytest
from arq.jobs import DeserializationError, deserialize_job_raw, deserialize_result, serialize_job, serialize_result
from hypothesis import given
from hypothesis import strategies as st

from memora.errors import ModelUnavailable
from memora.fold_queue import FOLD_JOB, QUEUE, deserialize_job, job_id
from memora.fold_queue import serialize_job as to_json

JOB: dict[str, Any] = {"t": None, "f": "fold", "a": ["demo", "g1", 4], "k": {}, "et": 1_700_000_000_000}

numbers = st.integers(-(2**53), 2**53)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=8,
)
jobs = st.fixed_dictionaries(
    {
        "t": st.none() | numbers,
        "f": st.text(),
        "a": st.lists(values, max_size=3),
        "k": st.dictionaries(st.text(), values, max_size=3),
        "et": numbers,
    }
)


def test_a_job_is_named_by_conversation_generation_and_count() -> None:
    """The same work has the same name; moved on, or in another life of the id, it has another."""
    assert job_id("demo", "g1", 4) == "fold:demo:g1:4"
    assert (
        len({job_id("demo", "g1", 4), job_id("demo", "g1", 6), job_id("demo", "g2", 4), job_id("other", "g1", 4)}) == 4
    )
    assert FOLD_JOB == "fold"
    assert "memora" in QUEUE


@given(jobs)
def test_a_job_comes_back_as_it_was(job: dict[str, object]) -> None:
    """Through JSON in ASCII-safe bytes, on one line."""
    data = to_json(job)
    assert deserialize_job(data) == job
    assert b"\n" not in data


def test_arq_reads_and_writes_jobs_through_it() -> None:
    """These are arq's own functions, with ours for the bytes."""
    data = serialize_job("fold", ("demo", "g1", 4), {}, None, 1_700_000_000_000, serializer=to_json)
    assert data is not None
    read: tuple[Any, ...] = deserialize_job_raw(data, deserializer=deserialize_job)
    assert read == ("fold", ["demo", "g1", 4], {}, None, 1_700_000_000_000)


def test_an_exception_becomes_its_name_and_never_its_text() -> None:
    """The text may quote what a person wrote."""
    data = serialize_result(
        *("fold", ("demo", "g1", 4), {}, 1, 1, False, ModelUnavailable("private words"), 2, 3, "ref", QUEUE, "id"),
        serializer=to_json,
    )
    assert data is not None
    assert b"private" not in data
    assert deserialize_result(data, deserializer=deserialize_job).result == "ModelUnavailable"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pickle.dumps(JOB), id="a-pickle"),
        pytest.param(b"cos\nsystem\n(S'true'\ntR.", id="a-pickle-that-would-run-a-command"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff\xfe\xfa", id="bytes-that-are-no-text"),
        pytest.param(json.dumps(JOB).encode()[:-5], id="cut-off"),
        pytest.param(json.dumps([JOB]).encode(), id="a-list"),
        pytest.param(b'"fold"', id="a-string"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[" * 100_000, id="nested-without-end"),
        pytest.param(json.dumps({**JOB, "k": {"x": float("nan")}}).encode(), id="not-a-number-is-no-json"),
        pytest.param(json.dumps(JOB).encode() * 2, id="two-jobs"),
        *(
            pytest.param(json.dumps({key: JOB[key] for key in JOB if key != missing}).encode(), id=f"without-{missing}")
            for missing in JOB
        ),
        pytest.param(json.dumps({**JOB, "f": None}).encode(), id="no-function-name"),
        pytest.param(json.dumps({**JOB, "a": {}}).encode(), id="arguments-as-object"),
        pytest.param(json.dumps({**JOB, "a": "demo"}).encode(), id="arguments-as-string"),
        pytest.param(json.dumps({**JOB, "k": []}).encode(), id="keywords-as-list"),
        pytest.param(json.dumps({**JOB, "et": "now"}).encode(), id="time-as-string"),
        pytest.param(json.dumps({**JOB, "et": True}).encode(), id="time-as-boolean"),
        pytest.param(json.dumps({**JOB, "et": 1.5}).encode(), id="time-as-fraction"),
        pytest.param(json.dumps({**JOB, "t": "1"}).encode(), id="attempt-as-string"),
    ],
)
def test_a_malformed_job_is_refused(data: bytes) -> None:
    """Whoever else writes to this Redis cannot make a worker run or choke on it: arq drops the job and goes on."""
    with pytest.raises(ValueError):  # noqa: PT011 - arq asks for no more
        deserialize_job(data)
    with pytest.raises(DeserializationError):
        deserialize_job_raw(data, deserializer=deserialize_job)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_job_or_refused(data: bytes) -> None:
    """There is no third way."""
    with suppress(ValueError):
        assert isinstance(deserialize_job(data), dict)
