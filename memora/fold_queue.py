"""The fold job as arq knows it: its name, queue, payload and serializer.

Owns the words shared by the scripts that enqueue and the worker that runs. Jobs are strict JSON: arq's default, pickle,
would run whatever another writer of the same Redis puts there. Must not open a connection.
"""

from __future__ import annotations

import json
from typing import Any, Final

QUEUE: Final = "memora:{0}:queue"
"""Our own queue, so that no other arq worker on the same Redis takes fold jobs for its own."""

HEARTBEAT_PREFIX: Final = "memora:{0}:worker."
"""How the keys begin in which workers show that they live; `.` keeps them apart from every conversation id."""

FOLD_JOB: Final = "fold"
"""Name of the function in the worker."""


def job_id(conversation_id: str, generation: str, summarized_message_count: int) -> str:
    """The name of the job that folds from this count on.

    The count in the name is what makes wake-ups safe: arq refuses an id while it is queued or running, and the messages
    that arrive meanwhile get a job of their own as soon as the running one has moved the count.
    """
    return f"{FOLD_JOB}:{conversation_id}:{generation}:{summarized_message_count}"


def serialize_job(job: dict[str, Any]) -> bytes:
    """Serialize what arq stores for a job or a result; an exception becomes its name, never its text."""
    result = job.get("r")
    if isinstance(result, BaseException):
        job = {**job, "r": type(result).__name__}
    return json.dumps(job, separators=(",", ":"), allow_nan=False).encode()


def deserialize_job(data: bytes) -> dict[str, Any]:
    """Read a job or a result.

    Raises:
        ValueError: it is not what arq writes; arq then drops the job and goes on.
    """
    try:
        job = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("a job must not be nested like this") from None
    if not isinstance(job, dict):
        raise ValueError("a job must be a JSON object")
    is_result = "s" in job
    if not is_result and not _is_well_formed(job):
        raise ValueError("a job must have a function name, arguments and a time")
    return job


def _is_well_formed(job: dict[str, Any]) -> bool:
    expected = {"f": str, "a": list, "k": dict, "et": int}
    # By its exact kind: in Python, but not in JSON, true is a number.
    return all(type(job.get(key)) is kind for key, kind in expected.items()) and (
        "t" in job and (job["t"] is None or type(job["t"]) is int)
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"a job must be JSON, which has no {name}")
