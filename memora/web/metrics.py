"""What a dashboard sees: counters of this process, and how far the folds are behind, read from Redis at each scrape.

Owns the names and labels; never a conversation's id among them. Folds happen in the worker, so they are counted here by
the hints that reach this server, from the first scrape on: every server behind one Redis that is looked at counts them
all, and none counts what it missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import anyio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from memora import __version__
from memora.chat import TurnResult
from memora.errors import StoreError
from memora.storage import Storage
from memora.web.turns import TurnTimes

_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 60, 120)
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, *_SECONDS)
_SCRAPE_SECONDS: Final = 1.5
_LOOKED_INTO: Final = 500
"""Waiting conversations that a scrape adds up; their number is exact whatever it is."""

_FOLD_RESULTS: Final = {"fold": "committed", "conflict": "conflict", "retry": "failed"}
_LAG: Final = ("conversations", "messages", "seconds", "queue")


class Metrics:
    """The figures of one server, in a registry of its own."""

    def __init__(self, storage: Storage) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # half of all lines, and no dashboard shows them
        self._storage = storage
        self.registry = CollectorRegistry()
        self._make_turn_figures()
        self._make_fold_figures()
        self._make_request_figures()

    def turn(self, result: TurnResult, times: TurnTimes) -> None:
        """Count a turn that was answered."""
        self._turns.labels("incomplete" if result.incomplete else "completed").inc()
        if times.memory is not None:
            self._memory.observe(times.memory)
        if times.first_piece is not None:
            self._first_token.observe(times.first_piece)
        self._turn_seconds.observe(times.whole)
        tokens = result.context.tokens
        for part, counter in self._input_tokens.items():
            counter.inc(getattr(tokens, part))
        self._output_tokens.inc(result.stats.output_tokens)
        self._gap_messages.inc(result.stats.gap_messages)
        self._turns_with_gap.inc(1 if result.stats.gap_messages else 0)

    def turn_failed(self, code: str) -> None:
        """Count a turn that came to nothing; `code` is that of the error."""
        self._turns.labels(code).inc()

    def fold(self, kind: str) -> None:
        """Count what a worker did; `kind` is that of the event."""
        result = _FOLD_RESULTS.get(kind)
        if result:
            self._folds.labels(result).inc()
        if kind == "conflict":
            self._conflicts.inc()

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request by the template of its path."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    async def page(self, _: Request) -> Response:
        """Everything, in the text format of Prometheus."""
        await self._read_backlog()
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _read_backlog(self) -> None:
        """Read the lag. Where Redis does not answer there is none to tell, which is not the same as 0."""
        figures: tuple[float, ...] = (math.nan,) * len(_LAG)
        is_up = False
        try:
            with anyio.fail_after(_SCRAPE_SECONDS):
                backlog = await self._storage.store.backlog(most=_LOOKED_INTO)
            figures = (backlog.conversations, backlog.messages, backlog.seconds, backlog.queued_jobs)
            is_up = True
        except (StoreError, TimeoutError):
            pass
        self._redis_up.set(is_up)
        for name, figure in zip(_LAG, figures, strict=True):
            self._lag[name].set(figure)

    def _make_turn_figures(self) -> None:
        self._turns = self._counter(
            "turns", "Turns by outcome: completed, incomplete, or the code of an error", "outcome"
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "From the request to the first piece")
        self._memory = self._histogram("memory_seconds", "From the request to the question to the model", _SHORT)
        self._turn_seconds = self._histogram("turn_seconds", "From the request to the stored turn")
        input_tokens = self._counter("input_tokens", "Tokens sent for answers, by part of the context", "part")
        self._input_tokens = {
            part: input_tokens.labels(part) for part in ("instructions", "summary", "tail", "message")
        }
        self._output_tokens = self._counter("output_tokens", "Tokens of answers")
        self._gap_messages = self._counter("gap_messages", "Messages that contexts had to leave out")
        self._turns_with_gap = self._counter("turns_with_gap", "Turns whose context had to leave messages out")

    def _make_fold_figures(self) -> None:
        self._folds = self._counter("folds", "Folds by result, as far as this server was told", "result")
        for result in _FOLD_RESULTS.values():
            self._folds.labels(result)
        self._conflicts = self._counter("fold_conflicts", "Folds that lost the race for a commit")
        self._lag = {
            "conversations": self._gauge("fold_pending_conversations", "Conversations that wait for a fold"),
            "messages": self._gauge("fold_lag_messages", "Messages that have left the window and wait for a fold"),
            "seconds": self._gauge("fold_lag_seconds", "How long the first of them has been waiting"),
            "queue": self._gauge("fold_queue_depth", "Fold jobs in the queue"),
        }
        self._redis_up = self._gauge("redis_up", "Whether Redis answered this scrape")

    def _make_request_figures(self) -> None:
        self._requests = self._counter("http_requests", "Requests", "method", "route", "status")
        to_the_end = "From request to the end of the reply"
        self._request_seconds = self._histogram("http_request_seconds", to_the_end, labels=("route",))
        self.in_flight = self._gauge("http_requests_in_flight", "Requests that are being answered")
        self.event_streams = self._gauge("event_streams", "Open event streams")
        self._gauge("build_info", "What runs here", "version").labels(__version__).set(1)

    def _counter(self, name: str, explanation: str, *labels: str) -> Counter:
        return Counter(f"memora_{name}", explanation, labels, registry=self.registry)

    def _gauge(self, name: str, explanation: str, *labels: str) -> Gauge:
        return Gauge(f"memora_{name}", explanation, labels, registry=self.registry)

    def _histogram(
        self, name: str, explanation: str, buckets: Sequence[float] = _SECONDS, labels: Sequence[str] = ()
    ) -> Histogram:
        return Histogram(f"memora_{name}", explanation, labels, buckets=buckets, registry=self.registry)
