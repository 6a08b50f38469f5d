"""The files for containers. No container engine runs in the tests: this checks what can be checked without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import memora
from memora.settings import Settings, load_settings, variable_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
    return document


def test_the_compose_file_follows_the_compose_specification() -> None:
    """Checked against the specification's JSON schema."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    checked = subprocess.run(
        [*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True, check=False, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_redis_keeps_what_it_is_given(compose: dict[str, Any]) -> None:
    """Append-only file, no eviction, a volume, and nobody starts before it is healthy."""
    redis = compose["services"]["redis"]
    command = redis["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert redis["volumes"]
    assert redis["healthcheck"]
    for name in ("worker", "chat"):
        assert compose["services"][name]["depends_on"]["redis"]["condition"] == "service_healthy"


def test_every_service_restarts_and_none_runs_as_root(compose: dict[str, Any]) -> None:
    """Long-running services come back by themselves; users are not root."""
    assert compose["services"]["redis"]["user"] == "redis"
    assert "USER 10001" in (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    for name in ("redis", "worker"):
        assert compose["services"][name]["restart"] == "unless-stopped"
        assert compose["services"][name]["healthcheck"]


def test_the_compose_environment_names_settings_that_exist(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every variable is one of ours, and the file's own values load; an unset variable arrives empty."""
    environment = compose["services"]["worker"]["environment"]
    known = {variable_of(field) for field in Settings.model_fields} | {"OPENAI_API_KEY", "OPENAI_BASE_URL"}
    assert set(environment) <= known
    for name, value in environment.items():
        monkeypatch.setenv(name, "" if value.startswith("${") else value)
    assert load_settings(_env_file=None).redis_url is not None


def test_the_image_carries_the_version_of_the_package(compose: dict[str, Any]) -> None:
    """The tag in the compose file follows the package."""
    assert compose["services"]["worker"]["image"] == f"memora:{memora.__version__}"
