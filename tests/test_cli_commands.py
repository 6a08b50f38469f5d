"""Every other command as a child process, over a real Redis: what it prints, how it ends, what it needs."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio.to_thread
import pytest
from arq.connections import ArqRedis
from command_line import ROOT, CommandLine, Model, finish
from polling import eventually
from redis_view import command, places_of
from tcp_proxy import TcpProxy

from memora.bootstrap import Memora, open_memora
from memora.embedded_redis import EmbeddedRedis
from memora.settings import Settings

HEAVY = {"openai", "redis", "arq", "pydantic", "pydantic_settings", "prompt_toolkit", "rich", "anyio", "httpx2"}


def lines_until(child: subprocess.Popen[bytes], wanted: str) -> list[str]:
    """What a command writes to stderr, up to the line that is waited for."""
    assert child.stderr is not None
    lines: list[str] = []
    while not lines or wanted not in lines[-1]:
        line = child.stderr.readline().decode()
        assert line, f"it ended after {lines}"
        lines.append(line)
    return lines


async def silence(_: str) -> None:
    """Nobody listens to the answers."""


@pytest.fixture
async def open_memory(settings: Settings, redis: ArqRedis) -> AsyncIterator[Memora]:
    """Memora over the emptied server, to fill it with."""
    assert await redis.dbsize() == 0
    async with open_memora(settings) as memora:
        yield memora


@pytest.fixture
def memora(tmp_path: Path, redis_server: EmbeddedRedis) -> CommandLine:
    """The command line over the same server."""
    return CommandLine(tmp_path, {"MEMORA_REDIS_URL": redis_server.url})


@pytest.fixture
def model() -> Iterator[Model]:
    """A model in a process of its own."""
    model = Model()
    yield model
    model.end()


def test_version_and_help_load_nothing_heavy(tmp_path: Path) -> None:
    """Nobody waits for `--version` or `--help`: no library that takes time to load is loaded for them."""
    code = (
        "import sys; sys.argv = ['memora', sys.argv[1]]\n"
        "from memora.__main__ import main\n"
        "code = main()\n"
        "print('LOADED', *{name.split('.')[0] for name in sys.modules})\n"
        "sys.exit(code)"
    )
    for option, word in (("--version", "memora 0."), ("--help", "doctor")):
        ran = subprocess.run(
            [sys.executable, "-c", code, option],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            check=False,
            text=True,
        )
        shown, _, loaded = ran.stdout.partition("LOADED")
        assert ran.returncode == 0
        assert word in shown
        assert not HEAVY & set(loaded.split())


def test_wrong_use_of_the_parser_is_one_line_and_2(tmp_path: Path) -> None:
    """An unknown command or option is named, with where to look; `memora` alone shows the help."""
    memora = CommandLine(tmp_path)
    alone, *wrong = memora.run_all((), ("chatt",), ("chat", "--nope"), ("delete",))
    assert alone.code == 0
    assert "Commands:" in alone.out
    for ran, named in zip(wrong, ("chatt", "--nope", "ID"), strict=True):
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert ran.err.startswith("memora: ")
        assert named in ran.err


async def test_inspect_shows_all_and_a_damaged_one_does_not_hide_the_others(
    open_memory: Memora, memora: CommandLine, redis: ArqRedis
) -> None:
    """The list says which one is damaged and why, shows the rest, and ends with 1."""
    for name in ("first", "second"):
        await open_memory.chat.reply(name, "我住在台北。", silence)
    table, as_json = memora.run_all(("inspect",), ("inspect", "--json"))
    assert (table.code, as_json.code) == (0, 0)
    head, *rows = table.lines
    assert head.split()[:2] == ["conversation", "messages"]
    assert [row.split()[:3] for row in rows] == [["second", "2", "0"], ["first", "2", "0"]]
    assert [found["conversation"] for found in as_json.json] == ["second", "first"]

    await command(redis, "RPOP", "memora:{0}:first:history")
    table, as_json, one = memora.run_all(("inspect",), ("inspect", "--json"), ("inspect", "first", "--json"))
    assert (table.code, as_json.code, one.code) == (1, 1, 1)
    assert "memora:{0}:first:history" in table.out
    assert "second" in table.out
    assert as_json.json[1]["error"]["code"] == "conversation_damaged"
    assert as_json.json[0]["message_count"] == 2
    assert json.loads(one.err)["code"] == "conversation_damaged"


async def test_a_conversation_that_is_not_there_is_said_so(memora: CommandLine, redis: ArqRedis) -> None:
    """`inspect`, `delete` and `export` of an unknown id end with 1; an id that cannot be is wrong use."""
    assert await redis.dbsize() == 0
    wrong = [("inspect", "nobody"), ("delete", "nobody"), ("export", "nobody"), ("delete", "no/body")]
    for (_, name), ran in zip(wrong, memora.run_all(*wrong), strict=True):
        assert (ran.code, ran.out) == ((1 if name == "nobody" else 2), "")
        assert ran.err.startswith("memora: ")
        assert name in ran.err
        assert ran.err.count("\n") == 1


async def test_export_is_whole_even_when_it_is_long_and_fails_when_it_is_deleted_meanwhile(
    open_memory: Memora, memora: CommandLine, redis: ArqRedis
) -> None:
    """All messages in order with their positions; a conversation deleted midway is an error, not half a file."""
    await open_memory.chat.reply("long", "I live in Taipei.", silence)
    record = json.dumps({"role": "user", "content": "x" * 100, "tokens": 13, "at": 1})
    await command(redis, "RPUSH", "memora:{0}:long:history", *[record] * 3_000)
    await command(redis, "HSET", "memora:{0}:long:summary", "message_count", 3_002)
    whole = memora.run("export", "long")
    assert whole.code == 0
    assert whole.json["conversation"] == "long"
    assert whole.json["folds"] == []
    assert [message["position"] for message in whole.json["messages"]] == list(range(3_002))
    assert whole.json["messages"][0]["content"] == "I live in Taipei."

    child = memora.start("export", "long")
    assert child.stdout is not None
    child.stdout.read(1_000)  # the pipe is full long before the end, so the child waits in the middle
    await open_memory.store.delete("long")
    ran = finish(child)
    assert ran.code == 1
    assert "deleted while" in ran.err


async def test_audit_says_what_is_wrong_with_which_key_and_what_to_do(
    open_memory: Memora, memora: CommandLine, redis: ArqRedis
) -> None:
    """Clean is 0, a finding 1 with its remedy, mended 0 again, and what cannot be mended stays 1."""
    summary = "memora:{0}:first:summary"
    for name in ("first", "second"):
        await open_memory.chat.reply(name, "我住在台北。", silence)
    clean, as_json, one = memora.run_all(("audit",), ("audit", "--json"), ("audit", "first"))
    assert (clean.code, as_json.code, one.code) == (0, 0, 0)
    assert all(line.startswith("✓ ") for line in clean.lines[:-2])
    assert clean.lines[-1] == "2 conversations, 4 messages, 0 folds: everything holds"
    assert one.lines[-1].startswith("1 conversations, 2 messages")
    assert clean.err == ""
    assert (as_json.json["ok"], as_json.json["messages"], as_json.json["findings"]) == (True, 4, [])

    await command(redis, "HSET", summary, "message_count", 4)
    found, as_json = memora.run_all(("audit",), ("audit", "--json"))
    assert (found.code, as_json.code) == (1, 1)
    assert "✗ counters" in found.out
    assert "first · counters" in found.out
    assert summary in found.out
    assert found.lines[-1].endswith("1 of them can be mended: `memora audit --repair`")
    [finding] = as_json.json["findings"]
    assert (finding["conversation"], finding["check"], finding["found"]) == ("first", "counters", "4")

    repaired = memora.run("audit", "--repair", "--json")
    assert (repaired.code, repaired.json["ok"], len(repaired.json["repairs"])) == (0, True, 1)
    await command(redis, "RPOP", "memora:{0}:first:history")
    left = memora.using(MEMORA_LANG="zh-TW").run("audit", "--repair")
    assert left.code == 1
    assert "無從推導" in left.lines[-1]


async def test_an_audit_that_takes_long_says_how_far_it_is_and_leaves_nothing_of_it(
    open_memory: Memora, memora: CommandLine, redis_server: EmbeddedRedis
) -> None:
    """One line on the terminal, written over and erased before the report; none of it where nobody watches."""
    for name in ("first", "second"):
        await open_memory.chat.reply(name, "我住在台北。", silence)
    async with TcpProxy(redis_server.url) as proxy:
        proxy.partition()
        with memora.using(MEMORA_REDIS_URL=proxy.url).in_terminal("audit") as terminal:

            async def waits_for_redis() -> bool:
                return bool(proxy.held_back)

            await eventually(waits_for_redis, seconds=20)
            # A line is due a tenth of a second after the beginning, and what Redis says comes later than that.
            due_at = time.monotonic() + 0.2

            async def is_due() -> bool:
                return time.monotonic() > due_at

            await eventually(is_due)
            proxy.heal()
            assert await anyio.to_thread.run_sync(terminal.wait_for_end) == 0
            line = r"\r\x1b\[K[02] conversations, [04] messages checked(.*)"
            said = re.search(line, terminal.raw.decode(), re.DOTALL)
            assert said, terminal.raw
            assert said[1].startswith("\r\x1b[K")
            assert "checked" not in terminal.text
            assert terminal.lines[0].startswith("✓ ")
            assert terminal.lines[-1] == "2 conversations, 4 messages, 0 folds: everything holds"
    assert "checked" not in memora.run("audit").err


async def test_an_audit_that_cannot_look_says_so(memora: CommandLine, redis: ArqRedis, tmp_path: Path) -> None:
    """Unreachable is 3, an unknown id 1, an id that cannot be 2."""
    assert await redis.dbsize() == 0
    nowhere = CommandLine(tmp_path).using(MEMORA_REDIS_URL="redis://127.0.0.1:1/0").run("audit", "--json")
    assert (nowhere.code, nowhere.out) == (3, "")
    assert json.loads(nowhere.err)["code"] == "storage_unavailable"
    unknown, wrong = memora.run_all(("audit", "nobody"), ("audit", "no/body"))
    assert (unknown.code, wrong.code) == (1, 2)
    assert "memora inspect" in unknown.err


async def test_delete_forgets_the_conversation_and_what_was_typed_in_it(
    open_memory: Memora, memora: CommandLine, redis: ArqRedis
) -> None:
    """No key and no typed line is left; in a terminal it asks first, and no is no."""
    typed = memora.home / "data" / "typed.jsonl"
    typed.parent.mkdir()
    typed.write_text('["gone", "secret"]\n["kept", "other"]\n')
    await open_memory.chat.reply("gone", "I live in Taipei.", silence)
    with memora.in_terminal("delete", "gone") as terminal:
        terminal.see("Delete conversation gone with its 2 messages for good? [y/N]")
        terminal.type("\n")
        assert terminal.wait_for_end() == 1
    assert await redis.exists("memora:{0}:gone:history")
    ran = memora.run("delete", "gone")
    assert (ran.code, ran.out) == (0, "conversation gone is gone\n")
    assert await places_of(redis, "gone") == []
    assert typed.read_text() == '["kept", "other"]\n'


async def test_the_worker_says_what_it_does_and_stops_when_told(
    open_memory: Memora, memora: CommandLine, model: Model, tmp_path: Path
) -> None:
    """One line at the start, one a fold, ids and counts only; SIGTERM is a clean end, Ctrl-C 130."""
    for number in range(5):
        await open_memory.chat.reply("busy", f"Fact {number}: I like the number {number}.", silence)
    worker = memora.using(**model.environment).start("worker")
    private = CommandLine(tmp_path).start("worker")
    first = lines_until(worker, "folded messages")
    opening, fold = first[0], first[-1]
    [private_opening] = lines_until(private, "folding for")
    worker.send_signal(signal.SIGTERM)
    private.send_signal(signal.SIGINT)
    ended, interrupted = finish(worker), finish(private)
    assert (ended.code, interrupted.code) == (0, 130)
    assert "redis.sock with gpt-5-mini" in opening
    assert "the private Redis in " in private_opening
    assert "conversation busy: folded messages 0 to 3, version 1, 0 pending" in fold
    assert "I like" not in "".join(first) + ended.err
    assert "Traceback" not in ended.err + interrupted.err


async def test_doctor_says_what_is_wrong_and_what_to_do(
    memora: CommandLine, redis: ArqRedis, model: Model, tmp_path: Path
) -> None:
    """Fine is 0, a finding 1, unreachable 3, and each line with a cross names its remedy."""
    private = CommandLine(tmp_path).using(MEMORA_MAX_INPUT_TOKNES="5").start("doctor")
    denied = CommandLine(tmp_path).using(**model.environment)
    model.fail(match="models", times=None, kind="status", status=401)
    no_model = denied.start("doctor", "--json")
    nowhere = CommandLine(tmp_path).using(MEMORA_REDIS_URL="redis://user:hidden@127.0.0.1:1/0").start("doctor")
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        evicting = memora.run("doctor", "--json")
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
    fine = finish(private)
    assert fine.code == 0
    assert "did you mean MEMORA_MAX_INPUT_TOKENS?" in fine.out
    assert "OPENAI_API_KEY" in fine.out
    assert "✗" not in fine.out
    assert "arq:*" in fine.out
    found = {check["check"]: check["status"] for check in evicting.json["checks"]}
    assert (evicting.code, evicting.json["ok"]) == (1, False)
    assert (found["eviction"], found["worker"], found["persistence"]) == ("problem", "problem", "ok")
    rejected = finish(no_model)
    assert rejected.code == 3
    assert "OPENAI_API_KEY" in rejected.json["checks"][-1]["message"]
    unreachable = finish(nowhere)
    assert unreachable.code == 3
    assert "MEMORA_REDIS_URL" in unreachable.out
    assert "hidden" not in unreachable.out + unreachable.err
