"""The load test: its figures and its plan, and a run of a few seconds against everything real."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from command_line import CommandLine, wait_until
from hypothesis import given
from hypothesis import strategies as st

from memora.cli.loadtest import lines_of
from memora.cli.texts import CHINESE, ENGLISH, Texts
from memora.embedded_redis import EmbeddedRedis
from memora.loadtest.histogram import Histogram
from memora.loadtest.page import page_of
from memora.loadtest.plan import (
    MOST_TIMES_THE_MEDIAN,
    Load,
    WrongLoad,
    message_text,
    plan_turns,
    settle,
    think_dues,
    word_count,
)
from memora.loadtest.report import record_of
from memora.loadtest.run import Seen
from memora.offline_model.markers import read_markers

LOADS = st.builds(
    Load,
    conversations=st.integers(1, 20),
    think_seconds=st.floats(0.5, 30),
    duration_seconds=st.floats(1, 30),
    message_words=st.integers(1, 40),
    seed=st.integers(0, 1_000),
)


@given(st.lists(st.floats(0, 10_000), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_within_a_thousandth(values: list[float], share: float) -> None:
    """Of the value that stands at this share of all of them, and never above the largest."""
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    found = histogram.percentile(share)
    assert found <= max(values)
    assert exact - 2e-6 <= found <= exact * 1.001 + 2e-6
    shares = [reached for _, reached in histogram.steps()]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_what_is_counted_in_ones_stays_whole() -> None:
    """No percentile of messages is a fraction of one."""
    histogram = Histogram(1.0)
    for value in range(10, 90):
        histogram.add(value)
    assert histogram.record() == {"p50": 49, "p90": 81, "p99": 89, "max": 89}


@given(LOADS)
def test_a_plan_is_open_fair_and_the_same_again(load: Load) -> None:
    """Due times ascend within the duration, no conversation has two turns more than another, numbers have no holes."""
    turns = list(plan_turns(load))
    assert turns == list(plan_turns(load))
    assert len(turns) == load.turns
    assert all(before.due <= after.due for before, after in pairwise(turns))
    assert 0 <= turns[0].due <= turns[-1].due < load.duration_seconds
    said: dict[int, int] = {}
    for turn in turns:
        assert turn.marker.turn == said.get(turn.conversation, 0)
        assert read_markers(turn.text) == [turn.marker]
        said[turn.conversation] = turn.marker.turn + 1
    counts = [said.get(number, 0) for number in range(load.conversations)]
    assert counts == [load.turns_of(number) for number in range(load.conversations)]
    assert max(counts) - min(counts) <= 1


@given(st.integers(1, 50), st.floats(1, 1_000), st.integers())
def test_a_conversation_is_as_busy_at_the_end_as_at_the_beginning(turns: int, duration: float, seed: int) -> None:
    """Wherever the circle of its think times is cut: exact in number, and each due time is as likely as any other."""
    dues = think_dues(turns, duration, random.Random(seed))
    assert len(dues) == turns
    assert dues == sorted(dues)
    assert all(0 <= due <= duration for due in dues)


def test_think_times_are_those_of_people() -> None:
    """Their mean is what was asked for; the median is less, and now and then somebody goes for a coffee."""
    dues = [think_dues(60, 600.0, random.Random(seed)) for seed in range(200)]
    thinking = [after - before for each in dues for before, after in pairwise(each)]
    assert statistics.mean(thinking) == pytest.approx(10.0, rel=0.03)
    assert statistics.median(thinking) == pytest.approx(7.8, rel=0.05)
    assert 0.01 < sum(seconds > 33 for seconds in thinking) / len(thinking) < 0.03
    halves = sum(due < 300 for each in dues for due in each)
    assert halves == pytest.approx(6_000, rel=0.05)


@given(st.integers(1, 1_000), st.integers())
def test_no_message_is_longer_than_the_longest(median: int, seed: int) -> None:
    """The bound that the budget of a private server is made for holds; nothing is empty."""
    text = message_text(median, random.Random(seed))
    assert text
    assert sum(map(word_count, _sentences(text))) <= median * MOST_TIMES_THE_MEDIAN


def test_messages_are_as_long_as_asked_and_in_two_languages() -> None:
    """Half of them are longer than the median, half shorter, and both languages come up often."""
    texts = [message_text(40, random.Random(seed)) for seed in range(1_000)]
    lengths = [sum(map(word_count, _sentences(text))) for text in texts]
    assert statistics.median(lengths) == pytest.approx(40, rel=0.1)
    assert min(lengths) < 12
    assert max(lengths) > 120
    assert sum(not text.isascii() for text in texts) > 700
    assert sum(any(map(str.isascii, text.split())) for text in texts) > 700


def _sentences(text: str) -> list[str]:
    """The text in stretches of one language."""
    stretches: list[str] = []
    for word in text.split():
        if stretches and word.isascii() and stretches[-1].isascii():
            stretches[-1] += f" {word}"
        else:
            stretches.append(word)
    return stretches


@given(
    st.none() | st.floats(0.01, 10_000), st.none() | st.integers(1, 100_000), st.none() | st.floats(0.01, 86_400)
)  # fmt: skip
def test_two_of_three_say_the_third(rate: float | None, conversations: int | None, think: float | None) -> None:
    """Turns a second are conversations by think time; who gives all three has to be right about it."""
    if rate and think:
        needed = max(1, round(rate * think))
        if needed > 100_000 or (conversations and not math.isclose(conversations, needed, rel_tol=0.01)):
            with pytest.raises(WrongLoad, match="--rate"):
                settle(rate, conversations, think)
            return
    chosen, seconds = settle(rate, conversations, think)
    assert chosen == (conversations or chosen)
    assert seconds > 0
    if rate:
        assert chosen / seconds == pytest.approx(rate)
    elif think:
        assert seconds == think


@pytest.fixture
def memora(tmp_path: Path) -> CommandLine:
    """The command line in an empty home."""
    return CommandLine(tmp_path).using(PYTHONWARNINGS="default")


def test_a_run_is_measured_audited_and_judged(memora: CommandLine) -> None:
    """Workers die, Redis restarts and the provider stumbles: every turn is answered, audit and judge find nothing.

    Two servers that know nothing of each other have the turns of each conversation in turn. They have those settings
    of the user that are measured, and no others.
    """
    (memora.home / ".env").write_text("MEMORA_FOLD_LEASE_SECONDS=1\nMEMORA_API_KEYS=secret\n", "utf-8")
    report = memora.home / "report.html"
    arguments = ("--rate", "6", "--conversations", "6", "--duration", "6", "--servers", "2", "--message-words", "30")
    model = ("--model-reply-seconds", "0.4", "--summary-seconds", "0.1", "--model-jitter", "0.5")
    faults = ("--kill-worker-every", "4", "--restart-redis-every", "2.5", "--provider-errors", "0.3")
    ran = memora.run("loadtest", *arguments, *model, *faults, "--json", "--html", str(report))
    assert ran.code == 0, ran.err
    record = ran.json
    assert (record["turns"], record["errors"]) == (36, 0)
    assert record["audit"]["ok"]
    assert record["judge"]["ok"]
    assert record["ledger"]["ok"]
    assert record["judge"]["markers"] == 36
    assert record["audit"]["messages"] == 72
    assert record["unfolded_messages"] == 0
    for name in ("workers killed", "Redis restarts", "provider errors"):
        assert record["accidents"][name] >= 1
    for name in ("time_to_first_token_seconds", "turn_seconds", "memory_overhead_seconds"):
        figures = record[name]
        assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["max"] < 30
    assert record["tokens"]["answer_input"] > record["tokens"]["answer_output"] > 0
    over_time = record["over_time"]
    assert sum(second["turns"] for second in over_time) == 36
    assert max(second["in_flight"] for second in over_time) == record["most_at_once"] >= 2
    assert max(second["conversations_active"] for second in over_time) == record["most_conversations_active"] <= 6
    page = report.read_text("utf-8")
    assert "audit clean" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_turns_that_are_due_too_early_are_held_back_and_counted(memora: CommandLine) -> None:
    """One person says ten things in two seconds to a model that takes 0.4 for each: latency counts from when due."""
    model = ("--model-first-seconds", "0.4", "--model-reply-seconds", "0", "--model-jitter", "0")
    options = (*model, "--summary-seconds", "0", "--json")
    ran = memora.run("loadtest", "--rate", "5", "--conversations", "1", "--duration", "2", *options)
    assert ran.code == 0, ran.err
    record = ran.json
    assert record["turns"] == 10
    assert record["most_at_once"] == 1
    assert record["turns_held_back"] >= 5
    assert record["turn_seconds"]["max"] > 2


def test_a_server_that_runs_is_tested_and_audited(memora: CommandLine, tmp_path: Path) -> None:
    """Its model cannot be asked what it saw, which is said and is no failure; everything else is looked at."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        everything = memora.using(MEMORA_REDIS_URL=server.url)
        child = everything.start("up", "--port", "0", stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            assert child.stdout
            ready = next(line for line in child.stdout if b"everything runs" in line).decode()
            url = ready.split("everything runs: ")[1].split()[0]
            ran = everything.run("loadtest", "--url", url, "--rate", "5", "--conversations", "2", "--duration", "2")
        finally:
            child.terminate()
            child.communicate(timeout=20)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("10 turns in ")
    for said in ("✓ audit clean: 2 conversations, 20 messages", "✓ ledger equal", "! not judged: only the offline"):
        assert said in ran.out


def test_ctrl_c_stops_the_turns_and_still_reports(memora: CommandLine) -> None:
    """What has been seen so far is audited, judged and written; the exit code says that it was stopped."""
    with memora.in_terminal("loadtest", "--rate", "5", "--conversations", "5", "--duration", "600") as terminal:
        terminal.see("/600 s", "turns, ")
        terminal.type("\x03")
        assert terminal.wait_for_end() == 130
        assert terminal.see("at once, at most: 5 conversations active", "✓ ledger equal", "✓ judge clean")


def test_a_load_test_that_is_killed_leaves_nothing(memora: CommandLine) -> None:
    """Servers, workers, model and Redis end, and the directory with all they wrote goes."""
    with TemporaryDirectory() as name:  # a short name: sockets are in it
        folder = Path(name)
        with memora.using(TMPDIR=name).start("loadtest", "--duration", "600", stderr=subprocess.DEVNULL) as child:
            wait_until(lambda: len(processes_in(folder)) >= 6, lambda: processes_in(folder))
            child.kill()
        wait_until(lambda: not processes_in(folder), lambda: processes_in(folder))
        wait_until(lambda: not list(folder.glob("memora-loadtest-*")), lambda: list(folder.iterdir()))


def processes_in(folder: Path) -> list[str]:
    """What runs in a folder or below it."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(str((place / "cwd").readlink()).removesuffix(" (deleted)")).is_relative_to(folder):
                found.append((place / "cmdline").read_bytes().decode().replace("\0", " "))
    return found


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--url", "ftp://127.0.0.1"), 2, "http://"),
        (("--url", "http://example.org"), 2, "--remote"),
        (("--remote",), 2, "--url"),
        (("--url", "http://127.0.0.1:9", "--kill-worker-every", "1"), 2, "private"),
        (("--url", "http://127.0.0.1:9", "--servers", "1"), 2, "--servers"),
        (("--url", "http://127.0.0.1:9"), 3, "begins no conversation"),
        (("--html", "/nowhere/report.html"), 2, "/nowhere/report.html"),
        (("--rate", "0"), 2, "--rate"),
        (("--rate", "nan"), 2, "--rate"),
        (("--rate", "5", "--think-seconds", "10", "--conversations", "20"), 2, "50 conversations, not 20"),
        (("--rate", "10000", "--think-seconds", "60"), 2, "100,000 are the most"),
        (("--rate", "10000", "--duration", "86400"), 2, "--duration"),
        (("--kill-worker-every", "0.01"), 2, "--kill-worker-every"),
        (("--restart-redis-every", "inf"), 2, "--restart-redis-every"),
        (("--provider-errors", "2"), 2, "--provider-errors"),
        (("--model-jitter", "1.5"), 2, "--model-jitter"),
    ],
)
def test_what_cannot_be_done_is_one_line(memora: CommandLine, arguments: tuple[str, ...], code: int, says: str) -> None:
    """With the exit code of its kind, before anything is started."""
    ran = memora.run("loadtest", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert len(ran.err.strip().splitlines()) == 1


@pytest.mark.parametrize("texts", [ENGLISH, CHINESE], ids=["en", "zh-TW"])
@pytest.mark.parametrize(
    ("found", "is_clean"),
    [
        ({}, True),
        ({"is_private": True}, False),
        ({"unfolded": 3}, False),
        ({"unfolded": -1}, True),
        ({"audit": {"ok": False, "conversations": 1, "messages": 2, "folds": 0, "findings": [{}]}}, False),
        ({"ledger": {"ok": False, "differences": [{}]}}, False),
        ({"judge": {"ok": False, "requests": 3, "gap_messages": 0, "violation_count": 1}}, False),
    ],
)
def test_a_finding_or_a_violation_is_no_success(found: dict[str, Any], is_clean: bool, texts: Texts) -> None:
    """It is said in the table and on the page, and decides the exit code; a private server has to be looked at."""
    seen = Seen(**found)
    seen.outcomes["ok"] = 1
    assert seen.is_clean is is_clean
    lines, page = "\n".join(lines_of(seen, texts.loadtest)), page_of(seen, {"command": "<i>"}, texts.loadtest)
    assert ("✗" in lines) is ("✗" in page) is not is_clean
    assert "<i>" not in page
    json.dumps(record_of(seen, {}))


def test_a_turn_without_an_answer_is_no_success() -> None:
    """Even if nothing else is wrong."""
    seen = Seen()
    seen.outcomes["unknown"] = 1
    seen.errors["timeout"] = 1
    assert not seen.is_clean
    assert "✗ 1 turns were not answered: 1 × timeout" in list(lines_of(seen, ENGLISH.loadtest))
