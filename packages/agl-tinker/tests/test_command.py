"""The command: its key, its other name, and what is missing."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agl_run.cli.main import cli


def run_agl(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def test_serve_tinker_is_the_command() -> None:
    found = run_agl("serve", "--tinker", "--help")
    assert "serve --tinker [OPTIONS] MODEL" in found.output
    assert "--samplers" in found.output


def test_serve_tinker_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_DISABLED_PLUGINS", "tinker")
    found = run_agl("serve", "--tinker", "model")
    assert 2 == found.exit_code
    assert "is in the plugin 'tinker'" in found.output


def test_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    found = run_agl("tinker", "serve", "model")
    assert 1 == found.exit_code
    assert "set TINKER_API_KEY, or give --key-file FILE" in found.output


def test_key_file_is_made_for_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "key"
    for _ in range(2):
        found = run_agl("tinker", "serve", str(tmp_path / "none"), "--key-file", str(file))
        assert "cannot be loaded" in found.output
    assert file.read_text().startswith("tml-")
    assert 0o600 == file.stat().st_mode & 0o777
