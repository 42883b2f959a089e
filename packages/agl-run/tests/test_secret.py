"""The secret that signs attempt tokens: from the environment, or from a file of its user."""

import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agl.errors import ConfigError
from agl_inspect.keys import state_dir
from agl_run import load_secret

SECRET = b"0123456789abcdef"


def test_load_secret_prefers_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("AGL_SECRET", "s" * 20)
    assert load_secret(tmp_path / "secret") == b"s" * 20
    monkeypatch.setenv("AGL_SECRET", "short")
    with pytest.raises(ConfigError, match="AGL_SECRET"):
        load_secret()


def test_load_secret_makes_one_file_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("AGL_SECRET", raising=False)
    path = tmp_path / "state" / "secret"
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: load_secret(path), range(16)))
    assert len(found) == 1
    assert len(next(iter(found))) == 64
    assert [path] == list(path.parent.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mode bits")
def test_load_secret_keeps_its_file_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("AGL_SECRET", raising=False)
    path = tmp_path / "secret"
    load_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_secret(path)


def test_load_secret_says_what_to_do_where_it_cannot_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("AGL_SECRET", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Set AGL_SECRET"):
        load_secret(tmp_path / "file" / "secret")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such variable")
def test_state_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert tmp_path / "agl" == state_dir()
