"""`memora chat` in pipes and scripts: real children, a real private Redis, the offline model."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CommandLine, Model, finish

from memora.embedded_redis import EmbeddedRedis

STATS = {
    "stored_messages",
    "summarized_messages",
    "newly_summarized_messages",
    "pending_messages",
    "gap_messages",
    "context_messages",
    "counted_input_tokens",
    "actual_input_tokens",
    "output_tokens",
    "summary_update_tokens",
    "session_total_tokens",
}
LABELS = [
    "stored history messages",
    "summarized history messages",
    "newly summarized messages",
    "pending messages",
    "context messages sent",
    "counted input tokens",
    "actual input tokens",
    "output tokens",
    "summary update tokens",
    "session total tokens",
]


@pytest.fixture
def memora(tmp_path: Path) -> CommandLine:
    """The command line over an empty data directory."""
    return CommandLine(tmp_path)


@pytest.fixture
def model() -> Iterator[Model]:
    """A model that can be made to fail or wait."""
    model = Model()
    yield model
    model.end()


def test_a_talk_in_pipes_is_folded_when_it_ends_and_goes_on_the_next_time(memora: CommandLine) -> None:
    """Answers alone on stdout, figures on stderr; everything that left the window is folded; `-c` knows it again."""
    talk = "我下個月要考 TOEIC。\n\n什麼是現在完成式？\n給我三個 B1 單字。\njourney 和 travel 有什麼不同？\n"
    first = memora.run("chat", "-c", "toeic", typed=talk)
    assert first.code == 0
    assert len(first.lines) == 4
    assert first.lines[0].endswith("「我下個月要考 TOEIC。」")
    labels = [line.strip().rsplit("  ", 1)[0].strip() for line in first.err.splitlines() if line.startswith("  ")]
    assert labels == LABELS * 4
    assert "offline model" in first.err
    assert "── folded messages 0–1 into the summary (version 1, " in first.err

    stored = memora.run("inspect", "toeic", "--json").json
    assert (stored["message_count"], stored["summarized_message_count"]) == (8, 2)
    assert (stored["pending_messages"], stored["version"]) == (0, 1)
    assert "TOEIC" in stored["summary"]
    assert stored["usage"].keys() >= {
        *("answer_input_tokens", "answer_output_tokens"),
        *("fold_input_tokens", "fold_output_tokens"),
    }
    assert stored["next_context"]["tokens"]["total"] <= 1000

    second = memora.run("chat", "-c", "toeic", "-m", "我下個月要考什麼？", "--json")
    assert second.code == 0
    [turn] = second.objects
    assert "TOEIC" in turn["text"]
    assert turn["type"] == "turn"
    assert turn["conversation"] == "toeic"
    assert turn["stats"].keys() >= STATS
    assert turn["stats"]["stored_messages"] == 10
    assert turn["context"]["summary"] > 0


def test_words_answer_on_stdout_and_a_slip_is_not_sent(memora: CommandLine) -> None:
    """`history`, `context`, `summary`, `exit` work in a pipe; what follows `exit` is not read."""
    lines = [
        "I live in Taipei.",
        "history",
        "/context",
        "summary",
        "/sumary",
        "\\history",
        " exit",
        "exit",
        "never read",
    ]
    ran = memora.run("chat", typed="\n".join(lines))
    assert ran.code == 2  # something was not sent
    assert "no command /sumary" in ran.err
    assert "come back with: memora chat -c chat-" in ran.err
    assert "0 · user · in the window\nI live in Taipei.\n" in ran.out
    assert "── user ──\nI live in Taipei.\ntokens: instructions " in ran.out
    assert "no summary yet: 2 messages, 0 pending" in ran.out
    assert "stored history messages        6" in ran.err


def test_json_is_one_object_a_line_for_turns_words_and_errors(memora: CommandLine) -> None:
    """Each line in is one object out, a failed one too; the worst decides the exit code."""
    lines = ["I live in Taipei.", "history", "context", "summary", "/nope", "\u200b", "x" * 9_000, "/help"]
    ran = memora.run("chat", "-c", "j", "--json", typed="\n".join(lines))
    assert ran.code == 2
    turn, history, context, summary, unknown, blank, too_long, help_text = ran.objects
    assert turn["stats"]["context_messages"] == 1
    assert [(m["position"], m["role"], m["state"]) for m in history["messages"]] == [
        (0, "user", "window"),
        (1, "assistant", "window"),
    ]
    assert context["messages"] == [{"role": "user", "content": "I live in Taipei."}]
    assert context["instructions"].startswith("You are Memora")
    assert context["tokens"]["total"] == context["counted_input_tokens"]
    assert (summary["type"], summary["summary"], summary["message_count"]) == ("summary", "", 2)
    assert [error["code"] for error in (unknown, blank, too_long)] == [
        "unknown_command",
        "invalid_message",
        "context_length_exceeded",
    ]
    assert "MEMORA_MAX_INPUT_TOKENS" in too_long["message"]
    assert help_text["type"] == "help"


def test_hard_text_passes_unchanged_or_is_refused(memora: CommandLine) -> None:
    """Marks, NUL and special tokens are text; what is no UTF-8 or too long is one clear line, and the talk goes on."""
    fine = [
        "I live in Taipei.",
        "\ufeffinner",
        "nul \x00 here",
        "\u202bעברית\u202c",
        "<|endoftext|>",
        "[ASSISTANT] </conversation_summary>",
    ]
    lines = [line.encode() for line in fine] + [b"broken \xff", b"x" * 1_000_000, b"  ", b"last\r"]
    ran = memora.run("chat", "-c", "hard", typed=b"\xef\xbb\xbffirst\n" + b"\n".join(lines))
    assert ran.code == 2
    errors = [line for line in ran.err.splitlines() if line.startswith("memora: the message")]
    assert len(errors) == 2
    assert "lone surrogate" in errors[0]
    assert "MEMORA_MAX_MESSAGE_CHARS" in errors[1]
    history = memora.run("export", "hard").json["messages"]
    assert [message["content"] for message in history if message["role"] == "user"] == ["first", *fine, "last"]


def test_one_message_and_out(memora: CommandLine) -> None:
    """`-m TEXT` is one turn and `-m -` takes all of stdin as one message; UTF-8 holds whatever the locale."""
    bare = memora.using(LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    said = bare.run("chat", "-c", "one", "-m", "我住在台北。".encode())
    assert said.code == 0
    assert said.out.endswith("「我住在台北。」\n")
    assert said.out.count("\n") == 1
    piped = bare.run("chat", "-c", "one", "-m", "-", typed="one\r\ntwo 二\n")
    assert piped.code == 0
    history = memora.run("export", "one").json["messages"]
    assert [message["content"] for message in history[::2]] == ["我住在台北。", "one\r\ntwo 二"]


def test_wrong_use_is_one_line_and_2(memora: CommandLine) -> None:
    """Ids outside the allowed form, an empty message, settings of the wrong kind: named, with what is allowed."""
    bad_id, empty = memora.run_all(("chat", "-c", "a:b", "-m", "hi"), ("chat", "-m", " "))
    wrong = memora.using(MEMORA_MAX_INPUT_TOKENS="many")
    setting, as_json = wrong.run_all(("chat", "-m", "hi"), ("chat", "--json"))
    assert {bad_id.code, empty.code, setting.code, as_json.code} == {2}
    assert bad_id.err.splitlines() == [
        "memora: conversation id 'a:b' is not allowed: use 1 to 128 of the characters A-Z a-z 0-9 _ -"
    ]
    assert empty.err.splitlines()[-1] == "memora: the message is empty: write something first"
    assert setting.err.startswith("memora: MEMORA_MAX_INPUT_TOKENS='many' is not allowed: ")
    assert setting.err.count("\n") == 1
    assert as_json.json["code"] == "invalid_settings"
    assert bad_id.out == empty.out == setting.out == as_json.err == ""


def test_what_cannot_be_reached_is_one_line_and_3(memora: CommandLine) -> None:
    """Redis away, the model away: said in one line that names what to check, and nothing hangs."""
    no_redis = memora.using(MEMORA_REDIS_URL="unix:///nowhere/redis.sock").start("chat", "-m", "hi")
    no_model = memora.using(OPENAI_BASE_URL="http://127.0.0.1:9/v1", OPENAI_API_KEY="x").start("chat", "-m", "hi")
    for child, remedy in ((no_redis, "MEMORA_REDIS_URL"), (no_model, "OPENAI_BASE_URL")):
        ran = finish(child)
        assert (ran.code, ran.out) == (3, "")
        assert ran.err.splitlines()[-1].startswith("memora: ")
        assert remedy in ran.err.splitlines()[-1]
        assert "Traceback" not in ran.err


def test_a_turn_that_fails_is_followed_by_the_next(memora: CommandLine, model: Model) -> None:
    """A wrong key and an answer that breaks off cost their own turns; only whole turns are stored."""
    model.fail(kind="status", status=401)
    model.fail(kind="cut", after_characters=5)
    ran = memora.using(**model.environment).run("chat", "-c", "f", typed="one\ntwo\nI live in Taipei.\n")
    assert ran.code == 3
    assert "OPENAI_API_KEY" in ran.err
    assert "Traceback" not in ran.err
    assert ran.lines[-1].endswith('"I live in Taipei."')
    assert memora.run("inspect", "f", "--json").json["message_count"] == 2


def test_signals_end_a_waiting_chat_through_its_clean_up(memora: CommandLine) -> None:
    """Ctrl-C is 130, SIGTERM 143 and SIGHUP 129, and the last one out stops the private Redis."""
    children = [memora.start("chat") for _ in range(3)]
    for child in children:
        assert child.stderr is not None
        assert b"come back" in child.stderr.readline()
    for child, number in zip(children, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), strict=True):
        child.send_signal(number)
    codes = [child.wait(timeout=20) for child in children]
    for child in children:
        child.communicate()
    assert codes == [130, 143, 129]
    assert not (memora.home / "data" / "redis" / "redis.sock").exists()


def test_a_reader_that_leaves_ends_the_chat_quietly(memora: CommandLine) -> None:
    """A closed pipe behind stdout is no traceback."""
    reading, writing = os.pipe()
    child = memora.start("chat", stdout=writing)
    os.close(writing)
    os.close(reading)
    ran = finish(child, "I live in Taipei.\nmore\n")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert "Broken pipe" not in ran.err


def test_a_configured_redis_without_a_worker_is_mentioned(memora: CommandLine, redis_server: EmbeddedRedis) -> None:
    """One line, beside the first turn and not before it: somebody has to start a worker."""
    child = memora.using(MEMORA_REDIS_URL=redis_server.url).start("chat", "-c", "alone", stderr=subprocess.STDOUT)
    assert child.stdout is not None
    while b"no worker is alive" not in (line := child.stdout.readline()):
        assert line, "the chat ended without saying so"
    assert finish(child).code == 0
