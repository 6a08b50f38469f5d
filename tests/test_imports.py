"""Who may import whom: the contracts in `pyproject.toml`, and that they bite."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts over the sources below `root`."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=root, capture_output=True, text=True, check=False, timeout=60
    )


def test_imports_point_downward_and_the_doors_are_kept() -> None:
    """Layers, the pure core, one door to Redis and arq, one to OpenAI."""
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        pytest.param("memora/store.py", "import memora.chat", "Imports point downward", id="a-door-imports-a-use-case"),
        pytest.param(
            "memora/core/text.py", "import memora.core.window", "Inside the core, too", id="upward-in-the-core"
        ),
        pytest.param(
            "memora/core/window.py", "import time", "The core decides and does nothing", id="a-clock-in-the-core"
        ),
        pytest.param(
            "memora/chat.py", "import redis.asyncio", "One door to Redis and arq", id="redis-through-the-window"
        ),
        pytest.param("memora/summarizer.py", "import openai", "One door to OpenAI", id="openai-through-the-window"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(module: str, line: str, contract: str, tmp_path: Path) -> None:
    """One line in the wrong file is found and named."""
    for package in ("memora", "workers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / module
    source.write_text(f"{source.read_text('utf-8')}\n{line}\n", "utf-8")
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout
    assert done.stdout.count("BROKEN") == 1
