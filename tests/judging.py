"""The judging offline model as a process of its own, spoken to over HTTP as a client of it would."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from memora.offline_model.judge import Outcome
from memora.offline_model.markers import Marker

START_SECONDS = 20.0


@dataclass(frozen=True)
class JudgingModel:
    """Where it answers, and its calls under `/_control`."""

    url: str
    http: httpx2.AsyncClient

    async def report(self, marker: Marker, outcome: Outcome, gap_messages: int = 0) -> None:
        """Tell it how a turn ended for its client."""
        report = {"marker": str(marker), "outcome": outcome, "gap_messages": gap_messages}
        await self._say("POST", "judge", {"reports": [report]})

    async def verdict(self) -> dict[str, Any]:
        """What it has found so far."""
        verdict: dict[str, Any] = await self._say("GET", "judge")
        return verdict

    async def requests(self) -> list[dict[str, Any]]:
        """Every request it got, oldest first."""
        requests: list[dict[str, Any]] = await self._say("GET", "requests")
        return requests

    async def add_fault(self, fault: dict[str, Any], **when: Any) -> None:
        """Let requests go wrong."""
        await self._say("POST", "faults", {"fault": fault, **when})

    async def _say(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        reply = await self.http.request(method, f"/_control/{path}", json=body)
        reply.raise_for_status()
        return reply.json()


@asynccontextmanager
async def offline_process(*options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`python -m memora.offline_model` with these options as long as the block lasts, and its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "memora.offline_model", *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            url = (await process.stdout.readline()).decode().strip()
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def judging_model(*options: str) -> AsyncIterator[JudgingModel]:
    """The offline model in judging mode, with more options if they are given."""
    async with offline_process("--judging", *options) as (_, url):
        root = url.removesuffix("/v1")
        async with httpx2.AsyncClient(base_url=root, verify=False, trust_env=False, timeout=20) as http:
            yield JudgingModel(url, http)
