"""The README tells the truth: its commands run, its output is real, its tables are the code's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memora.settings import settings_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")

BLOCK = re.compile(r"```(?P<kind>sh|console|bash|python)\n(?P<text>.*?)```", re.DOTALL)
VOLATILE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|\b[0-9a-f]{16}\b")
"""Times and generations differ from run to run."""

FIRST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install uv && .venv/bin/uv run memora chat"
TEST_COMMAND = "python3 -m venv .venv && .venv/bin/pip install uv && .venv/bin/uv run --group test pytest -n auto"
SERVER = "http://127.0.0.1:8000"
LONG_RUNNING = {
    *(FIRST_COMMAND, TEST_COMMAND),
    *("memora worker", "memora chat", "memora up"),
    "memora loadtest --rate 20 --conversations 200 --duration 120 --workers 3",
    *(f"python benchmarks/{name}.py" for name in ("flat_cost", "cost", "economics", "growth")),
}
"""Checked by tests of their own below, the second by CI, and the last by `test_benchmarks.py`."""


def blocks(kind: str) -> list[str]:
    return [block["text"].strip() for block in BLOCK.finditer(README) if block["kind"] == kind]


def commands_and_output() -> list[tuple[str, str]]:
    """The `$ command` lines of the console blocks, each with what follows it."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks("console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return [(command, "\n".join(output)) for command, output in found]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A person's shell in which `memora` and `python` are this checkout's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, call in (("memora", f'"{sys.executable}" -m memora "$@"'), ("python", f'"{sys.executable}" "$@"')):
        script = folder / name
        script.write_text(f"#!/bin/sh\nexec {call}\n")
        script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "MEMORA_DATA_DIR": str(tmp_path / "data"),
        "LC_ALL": "C.UTF-8",
    }


def run(command: str, environment: dict[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command],
        input=text, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_the_commands_of_the_readme_print_what_it_says(environment: dict[str, str]) -> None:
    """Every `$` line, run in order in one place, gives the output below it, but for times and generations."""
    for command, output in commands_and_output():
        if command in LONG_RUNNING:
            continue
        done = run(command, environment)
        assert done.returncode == 0, done.stderr
        assert VOLATILE.sub("·", done.stdout.strip()) == VOLATILE.sub("·", output), command


def test_every_command_of_the_readme_is_known_to_a_test() -> None:
    """A command that is added to a `sh` block has to be added here as well."""
    for block in blocks("sh"):
        assert set(block.splitlines()) <= LONG_RUNNING


def test_the_first_command_needs_nothing_but_python_and_pip(environment: dict[str, str]) -> None:
    """What it ends in starts a chat on a machine without Redis, key or Docker."""
    assert FIRST_COMMAND in blocks("sh")
    done = run(FIRST_COMMAND.rpartition("uv run ")[2], environment, "hello\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(offline model)")


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """To the letter."""
    assert TEST_COMMAND in blocks("sh")
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()


def test_the_benchmark_of_the_readme_runs(environment: dict[str, str]) -> None:
    """A few rounds of it: the figures of a busy machine are not judged here, only that they are made."""
    done = run("python benchmarks/flat_cost.py --rounds 5 --json", environment)
    assert '"ratio"' in done.stdout, done.stderr


def test_the_examples_for_the_server_run_against_it(environment: dict[str, str]) -> None:
    """The client's and every `curl` line, against `memora serve`, which `memora up` starts as well."""
    server = subprocess.Popen(
        [sys.executable, "-m", "memora", "serve", "--port", "0"],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = re.findall(r"http://[\d.:]+", server.stdout.readline())[0]
        (script,) = blocks("python")
        done = run(f"python - <<'END'\n{script.replace(SERVER, url)}\nEND", environment)
        assert done.stdout.splitlines()[-1].count("TOEIC"), done.stderr
        for line in (line for block in blocks("bash") for line in block.splitlines()):
            assert line.startswith("curl ")
            if shutil.which("curl"):
                done = run(line.replace(SERVER, url), environment)
                assert done.returncode == 0, line
                assert "error" not in json.loads(done.stdout), line
    finally:
        server.terminate()
        server.wait(timeout=30)
        if server.stdout is not None:
            server.stdout.close()


def test_the_settings_table_is_made_from_the_settings() -> None:
    """Name, default and meaning of every setting are the code's."""
    table = README.partition("settings_table() -->\n")[2].partition("\n<!-- end of settings -->")[0]
    assert table == settings_table()


def test_every_test_file_that_the_readme_names_exists() -> None:
    """A guarantee points at something."""
    for path in re.findall(r"(?:tests|benchmarks)/[\w/.]+", README):
        assert (ROOT / path).exists(), path
