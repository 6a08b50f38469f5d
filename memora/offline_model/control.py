"""The calls under `/_control`, so that a test can drive the offline model, and ask its judge, from another process.

Owns their paths and bodies. Must not hold state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from memora.offline_model.call import read_object
from memora.offline_model.errors import Rejected
from memora.offline_model.exchange import Exchange
from memora.offline_model.faults import read_rule
from memora.offline_model.judge import OUTCOMES, Judge, Report
from memora.offline_model.markers import read_markers
from memora.offline_model.script import Script

CONTROL_PATH: Final = "/_control/"
JUDGE_PATH: Final = CONTROL_PATH + "judge"
FAILURES_PATH: Final = CONTROL_PATH + "failures"
"""How many requests have failed by chance."""


async def control(exchange: Exchange, script: Script) -> None:
    """Do one scripting call and reply.

    Raises:
        Rejected: there is no such call, or its body says something that cannot be.
    """
    request = exchange.request
    action = _ACTIONS.get((request.method, request.path.removeprefix(CONTROL_PATH)))
    if action is None:
        raise Rejected(404, f"There is no scripting call {request.method} {request.path}.", code="not_found")
    given = read_object(request.body) if request.body else {}
    await exchange.send_json(200, action(script, given, request.query))


async def judge_control(exchange: Exchange, judge: Judge) -> None:
    """Take down the reports of a `POST`, all or none of them, or reply to a `GET` with the verdict.

    Raises:
        Rejected: it is neither, or a report says something that cannot be.
    """
    request = exchange.request
    if request.method == "POST":
        reports = read_object(request.body).get("reports")
        if not isinstance(reports, list):
            raise Rejected(400, "'reports' has to be a list of objects.", param="reports")
        for report in [_read_report(given) for given in reports]:
            judge.report(report)
        await exchange.send_json(200, {})
    elif request.method == "GET":
        await exchange.send_json(200, judge.verdict())
    else:
        raise Rejected(
            405, "The judge takes POST and GET.", code="method_not_supported", headers={"allow": "GET, POST"}
        )


def _read_report(given: object) -> Report:
    if not isinstance(given, dict):
        raise Rejected(400, "A report has to be an object.", param="reports")
    markers = read_markers(str(given.get("marker")))
    if len(markers) != 1:
        raise Rejected(400, "The 'marker' of a report has to be like [#k3:7].", param="reports")
    outcome, gap = given.get("outcome"), given.get("gap_messages", 0)
    if outcome not in OUTCOMES:
        raise Rejected(400, f"The 'outcome' of a report has to be one of {', '.join(OUTCOMES)}.", param="reports")
    if not isinstance(gap, int) or isinstance(gap, bool) or gap < 0:
        raise Rejected(400, "The 'gap_messages' of a report have to be a count.", param="reports")
    return Report(markers[0], outcome, gap)


def _add_fault(script: Script, given: Mapping[str, Any], _: Mapping[str, str]) -> object:
    return {"id": script.faults.add(read_rule(given))}


def _clear_faults(script: Script, *_: object) -> object:
    script.faults.clear()
    return {}


def _requests(script: Script, _: Mapping[str, Any], query: Mapping[str, str]) -> object:
    since = query.get("since", "0")
    if not since.isdecimal() or len(since) > 18:
        raise Rejected(400, "'since' has to be a count of requests.", param="since")
    return script.requests(int(since))


def _clear_requests(script: Script, *_: object) -> object:
    script.clear_requests()
    return {}


def _hold(script: Script, given: Mapping[str, Any], _: Mapping[str, str]) -> object:
    return {"id": script.hold(given)}


def _release(script: Script, given: Mapping[str, Any], _: Mapping[str, str]) -> object:
    hold_id = given.get("id")
    if hold_id is not None and not isinstance(hold_id, int):
        raise Rejected(400, "'id' has to be the id of a hold, or null for all.", param="id")
    script.release(hold_id)
    return {}


def _state(script: Script, *_: object) -> object:
    return script.state()


_ACTIONS: Final[dict[tuple[str, str], Callable[[Script, Mapping[str, Any], Mapping[str, str]], object]]] = {
    ("POST", "faults"): _add_fault,
    ("DELETE", "faults"): _clear_faults,
    ("GET", "requests"): _requests,
    ("DELETE", "requests"): _clear_requests,
    ("POST", "hold"): _hold,
    ("POST", "release"): _release,
    ("GET", "state"): _state,
}
