"""Keys in a file: several at once, read again when the file changes, and unchanged if the new file is bad."""

import logging
import os
import sys
from pathlib import Path

import pytest

from agl.errors import ConfigError, TokenError
from agl_inspect.keys import KeyFile
from agl_run import load_secret, signing_keys
from agl_run.access.tokens import AdminKey, AttemptTokens

OLD, NEW = b"an-old-key-0123456789", b"a-new-key-0123456789"


def write(path: Path, content: bytes, *, mode: int = 0o600) -> Path:
    """Replace the whole file in one step, as tools that manage secrets do."""
    draft = path.with_name("draft")
    draft.write_bytes(content)
    draft.chmod(mode)
    draft.replace(path)
    return path


def test_first_key_signs_and_every_key_verifies(tmp_path: Path):
    path = write(tmp_path / "keys", OLD + b"\n\n  " + NEW + b" \r\n" + OLD)
    keys = KeyFile(path, purpose="signing key")
    assert OLD + b"\n" + NEW == keys()
    tokens = AttemptTokens(keys)
    token = tokens.issue("r", "r.1", expires_at=10.0)
    assert "r.1" == AttemptTokens(OLD).verify(token, now=0).attempt_id
    assert "r.2" == tokens.verify(AttemptTokens(NEW).issue("r", "r.2", expires_at=10.0), now=0).attempt_id


def test_key_is_refused_once_its_line_is_gone(tmp_path: Path):
    path = write(tmp_path / "keys", OLD)
    tokens = AttemptTokens(KeyFile(path, purpose="signing key"))
    token, before = tokens.issue("r", "r.1", expires_at=10.0), tokens.changes()
    write(path, NEW + b"\n" + OLD)
    tokens.verify(token, now=0)
    assert tokens.issue("r", "r.1", expires_at=10.0) != token
    write(path, NEW)
    with pytest.raises(TokenError, match="signature does not match"):
        tokens.verify(token, now=0)
    assert before + 2 == tokens.changes()


def test_admin_key_is_signed_anew_with_the_new_key(tmp_path: Path):
    path = write(tmp_path / "keys", OLD)
    key = AdminKey(KeyFile(path, purpose="signing key"), clock=lambda: 5.0)
    first = key()
    assert first == key()
    write(path, NEW + b"\n" + OLD)
    assert "admin" == AttemptTokens(NEW).verify(key(), now=5.0).scope


@pytest.mark.parametrize("bad", [b"", b"short\n", NEW + b"\nshort", b"x" * 100_000])
def test_bad_change_is_named_once_and_leaves_the_keys_in_use(tmp_path, caplog, bad: bytes):
    path = write(tmp_path / "keys", OLD)
    keys = KeyFile(path, purpose="signing key")
    write(path, bad)
    with caplog.at_level(logging.WARNING):
        assert [OLD, OLD] == [keys(), keys()]
    assert 1 == len(caplog.records)
    assert "stay in use" in caplog.text
    assert NEW.decode() not in caplog.text
    path.unlink()
    assert OLD == keys()
    write(path, NEW)
    assert NEW == keys()


def test_keys_follow_a_link_that_is_moved_as_kubernetes_does(tmp_path: Path):
    for name, key in (("one", OLD), ("two", NEW)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "key", key)
    (tmp_path / "data").symlink_to("one")
    keys = KeyFile(tmp_path / "data" / "key", purpose="signing key")
    assert OLD == keys()
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(tmp_path / "data")
    assert NEW == keys()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mode bits")
def test_file_that_everybody_can_read_is_refused(tmp_path: Path):
    path = write(tmp_path / "keys", OLD, mode=0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyFile(path, purpose="signing key")
    path.chmod(0o440)  # as Kubernetes mounts a secret for a group
    assert OLD == KeyFile(path, purpose="signing key")()


def test_signing_keys_come_from_the_file_that_the_environment_names(tmp_path, monkeypatch):
    monkeypatch.delenv("AGL_SECRET", raising=False)
    path = write(tmp_path / "keys", OLD + b"\n" + NEW)
    monkeypatch.setenv("AGL_SECRET_FILE", str(path))
    keys = signing_keys()
    assert OLD == load_secret()
    write(path, NEW)
    assert NEW == keys()
    monkeypatch.setenv("AGL_SECRET", "s" * 32)
    with pytest.raises(ConfigError, match="unset one of them"):
        signing_keys()
    monkeypatch.delenv("AGL_SECRET")
    os.unlink(path)
    with pytest.raises(ConfigError, match="which AGL_SECRET_FILE names"):
        signing_keys()


def test_several_keys_may_stand_in_the_environment(monkeypatch):
    monkeypatch.setenv("AGL_SECRET", f"{NEW.decode()}\n{OLD.decode()}")
    assert NEW == load_secret()
    AttemptTokens(signing_keys()).verify(AttemptTokens(OLD).issue("r", "r.1", expires_at=9.0), now=0)
