"""`memora chat` at a terminal: a real pty, a real private Redis with its worker, the offline model."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CommandLine, Model, Terminal

ASKED_TO_LEAVE = "come back with: memora chat -c"
EMPTY_PROMPT = ">"


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


def say(terminal: Terminal, text: str, answer: str) -> None:
    """Type a message and wait for its answer, its figures and the next prompt."""
    terminal.type(f"{text}\r")
    terminal.see(answer)
    terminal.see_last_line(EMPTY_PROMPT)


def test_a_talk_in_chinese_with_edits_a_paste_and_a_fold_that_slides_in(memora: CommandLine) -> None:
    """Wide characters are erased whole, a pasted block is one message, and a fold is told above what is being typed."""
    with memora.using(MEMORA_LANG="zh-TW").in_terminal("chat", "-c", "toeic") as terminal:
        terminal.see("Memora 0.1.0", "對話 toeic", "離線模型")
        terminal.see_last_line(EMPTY_PROMPT)
        terminal.type("我下個月要考托福")
        terminal.see_last_line("> 我下個月要考托福")
        terminal.type("\x7f\x7f")
        terminal.see_last_line("> 我下個月要考")
        say(terminal, " TOEIC。", "「我下個月要考 TOEIC。」")

        terminal.paste("第一行\n第二行\n第三行")
        terminal.see("> 第一行\n  第二行\n  第三行")
        terminal.type("\r")
        terminal.see("已儲存的歷史訊息  4")
        terminal.see_last_line(EMPTY_PROMPT)

        terminal.type("用 Alt-Enter")
        terminal.type("\x1b\r")
        say(terminal, "換行", "已儲存的歷史訊息  6")
        terminal.type("我住在台北。\r打到一半")
        terminal.see("── 已將第 0–1 則訊息併入摘要（版本 1，", "已儲存的歷史訊息  8")
        terminal.see_last_line("> 打到一半")

        terminal.type("\x03")
        terminal.see_last_line(EMPTY_PROMPT)
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
        assert "memora chat -c toeic" in terminal.lines[-1]
        assert terminal.modes == terminal.modes_before
    exported = memora.run("export", "toeic").json
    said = [message["content"] for message in exported["messages"] if message["role"] == "user"]
    assert said == ["我下個月要考 TOEIC。", "第一行\n第二行\n第三行", "用 Alt-Enter\n換行", "我住在台北。"]


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(memora: CommandLine, model: Model) -> None:
    """Nothing is stored of a stopped answer, the message is in the prompt again, and keys typed meanwhile are kept."""
    with memora.using(**model.environment).in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        model.say("POST", "hold", match="answer")
        terminal.type("I live in Taipei.\r")
        model.wait_until_asked()
        terminal.type("\x03")
        terminal.see("stopped; nothing was stored")
        terminal.see_last_line("> I live in Taipei.")

        terminal.type("\x15I live in Taichung.\r")
        model.wait_until_asked()
        terminal.type("next one")
        model.say("POST", "release")
        terminal.see('"I live in Taichung."', "stored history messages      2")
        terminal.see_last_line("> next one")

        terminal.type("\x03history\r")
        screen = terminal.see("1 · assistant · in the window")
        assert "I live in Taipei." not in screen.split("> history")[-1]


def test_a_model_that_fails_costs_a_line_and_not_the_message(memora: CommandLine, model: Model) -> None:
    """One clear line; the text stands in the prompt again, and sending it again works."""
    with memora.using(**model.environment).in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        model.fail(kind="status", status=401)
        terminal.type("I live in Taipei.\r")
        terminal.see("memora: the model's endpoint rejects the API key (status 401): check OPENAI_API_KEY")
        terminal.see_last_line("> I live in Taipei.")
        terminal.type("\r")
        terminal.see('"I live in Taipei."', "stored history messages      2")


def test_what_a_terminal_would_obey_is_shown_instead(memora: CommandLine, model: Model) -> None:
    """Escape sequences, bells and carriage returns in an answer reach the screen as their names, never as commands."""
    with memora.using(**model.environment).in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        model.fail(kind="text", text="a\x1b[2Jb \x1b]0;title\x07 c\rd \x9b31m é 好\nnext")
        terminal.type("go\r")
        terminal.see(r"a\x1b[2Jb \x1b]0;title\x07 c\x0dd \x9b31m é 好" + "\nnext")
        assert b"\x1b[2J" not in terminal.raw
        assert b"\x1b]0;" not in terminal.raw


def test_ctrl_c_at_the_prompt_clears_it_and_then_says_how_to_leave(memora: CommandLine) -> None:
    """A typed line is dropped; on an empty one, the second Ctrl-C names Ctrl-D. The Up key knows earlier chats."""
    with memora.in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        say(terminal, "I live in Taipei.", "stored history messages")
        terminal.type("oh no\x03")
        terminal.see_last_line(EMPTY_PROMPT)
        terminal.type("\x03\x03")
        terminal.see("Ctrl-D leaves the chat")
        terminal.type("/exit\r")
        assert terminal.wait_for_end() == 0
    typed = memora.home / "data" / "typed.jsonl"
    assert typed.stat().st_mode & 0o777 == 0o600
    with memora.in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        terminal.type("\x1b[A\x1b[A")
        terminal.see_last_line("> I live in Taipei.")


def test_words_are_obeyed_unless_they_are_meant_for_the_model(memora: CommandLine) -> None:
    """`summary` and `/summary` are ours, an unknown `/word` is not sent, and a space or a backslash sends the word."""
    with memora.in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        say(terminal, "summary", "no summary yet: 0 messages, 0 pending")
        say(terminal, "/sumary", "no command /sumary, so nothing was sent. Did you mean /summary?")
        say(terminal, "\\summary", "stored history messages      2")
        say(terminal, "/context", "── user ──\nsummary\ntokens:")
        say(terminal, "/help", "put a space or a backslash in front")


def test_sigterm_leaves_the_terminal_and_the_machine_as_they_were(memora: CommandLine) -> None:
    """At the prompt too: the modes are restored and the private Redis is stopped by its last user. The code is 143."""
    with memora.in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        assert (memora.home / "data" / "redis" / "redis.sock").exists()
        terminal.child.send_signal(signal.SIGTERM)
        assert terminal.wait_for_end() == 143
        assert terminal.modes == terminal.modes_before
        assert not (memora.home / "data" / "redis" / "redis.sock").exists()


def test_no_color_means_no_color(memora: CommandLine) -> None:
    """Under NO_COLOR no color is sent, and everything else works."""
    with memora.using(NO_COLOR="1").in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        say(terminal, "I live in Taipei.", "stored history messages")
        for code in (b"\x1b[2m", b"\x1b[1m", b"\x1b[31m", b"\x1b[33m", b"\x1b[38"):
            assert code not in terminal.raw


def test_a_dumb_terminal_gets_plain_lines(memora: CommandLine) -> None:
    """With TERM=dumb the chat goes by lines, with a prompt and without a single escape sequence."""
    with memora.using(TERM="dumb").in_terminal("chat") as terminal:
        terminal.see_last_line(EMPTY_PROMPT)
        terminal.type("I live in Taipei.\n")
        terminal.see('"I live in Taipei."', "session total tokens")
        terminal.see_last_line(EMPTY_PROMPT)
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
        assert b"\x1b" not in terminal.raw
