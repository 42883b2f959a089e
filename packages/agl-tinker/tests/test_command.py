"""The command ``agl tinker``: the API key, and the messages about missing dependencies."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from agl.errors import ConfigError
from agl_inspect.terminal.program import cli
from agl_tinker.server.checkpoints import Checkpoints
from agl_tinker.server.running import listen

from .world import KEY


def run_agl(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def test_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    found = run_agl("tinker", "serve", "model")
    assert 1 == found.exit_code
    assert "set TINKER_API_KEY, or give --key-file FILE" in found.output


def test_wrong_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("short")
    found = run_agl("tinker", "serve", "model", "--key-file", str(file))
    assert 1 == found.exit_code
    assert "begins with 'tml-'" in found.output


def test_port_that_is_none_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    found = run_agl("tinker", "serve", "model", "--port", "70000")
    assert 2 == found.exit_code
    assert "70000 is not in the range" in found.output


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be made .*; choose another --folder"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_address_of_ipv6_is_a_url() -> None:
    async def body() -> str:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        try:
            return await listen(runner, host="::1", port=0)
        finally:
            await runner.cleanup()

    try:
        url = asyncio.run(body())
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert url.startswith("http://[::1]:")


def test_key_file_is_made_for_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "key"
    for _ in range(2):
        found = run_agl("tinker", "serve", str(tmp_path / "none"), "--key-file", str(file))
        assert "cannot be loaded" in found.output
    assert file.read_text().startswith("tml-")
    assert 0o600 == file.stat().st_mode & 0o777
