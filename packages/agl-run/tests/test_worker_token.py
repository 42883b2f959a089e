"""A worker's token: where it is read, how an order carries it, and for which stores it is valid."""

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from agl.errors import ConfigError, TokenError
from agl_inspect.terminal.program import cli
from agl_run import ExperimentConfig, ExperimentSection, worker_key
from agl_run.access.tokens import AttemptTokens
from agl_run.worker.fleet_worker import WorkerOrder

SECRET = "a-secret-of-the-tests-with-enough-characters"
KEYS = ("AGL_SECRET", "AGL_SECRET_FILE", "AGL_WORKER_TOKEN", "AGL_WORKER_TOKEN_FILE")


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.setenv(name, "")  # so that what a test leaves is taken back
        monkeypatch.delenv(name)


def order(store_url: str) -> WorkerOrder:
    """Return an order that holds the signing key."""
    config = ExperimentConfig(experiment=ExperimentSection(name="mine", agent="agent:solve", train="tasks.jsonl"))
    return WorkerOrder(config=config, folder=".", store_url=store_url, secret=SECRET, plugins={})


def test_token_is_that_of_the_variable_or_of_the_files_first_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert worker_key() is None
    file = tmp_path / "token"
    file.write_text("agl_first-token-of-the-file\nagl_second-token-of-the-file\n")
    file.chmod(0o600)
    monkeypatch.setenv("AGL_WORKER_TOKEN_FILE", str(file))
    key = worker_key()
    assert key is not None
    assert "agl_first-token-of-the-file" == key()
    file.write_text("agl_another-token\n")
    assert "agl_another-token" == key()
    monkeypatch.setenv("AGL_WORKER_TOKEN", "agl_token-of-the-variable")
    with pytest.raises(ConfigError, match="are both set; unset one"):
        worker_key()
    monkeypatch.delenv("AGL_WORKER_TOKEN_FILE")
    key = worker_key()
    assert key is not None
    assert "agl_token-of-the-variable" == key()


def test_file_that_is_not_there_is_named_with_the_command_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_WORKER_TOKEN_FILE", "no-such-file")
    with pytest.raises(ConfigError, match=r"no-such-file.*`agl worker-token EXPERIMENT`"):
        worker_key()


@pytest.mark.parametrize("url", ["http://gateway:4747", "https://gateway:4747?ca=ca.pem"])
def test_order_for_a_worker_at_a_gateway_holds_a_token_for_its_experiment_and_no_key(url: str) -> None:
    own = order(url).for_worker()
    claim = AttemptTokens(SECRET.encode()).verify(own.token, now=time.time())
    assert ("worker", "mine") == (claim.scope, claim.experiment)
    assert claim.expires_at > time.time() + 86_400
    assert "" == own.secret
    assert SECRET not in str(vars(own))
    assert own.token not in repr(own)


@pytest.mark.parametrize(
    "url", ["postgresql://agl@db/agl", "sqlite:///runs.db", "http://:token-of-its-own@gateway:4747"]
)
def test_order_for_another_store_stays_as_it_is(url: str) -> None:
    assert order(url) == order(url).for_worker()


def test_order_leaves_no_key_of_the_machine_beside_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    for mine, expected in (
        (
            WorkerOrder(config=order(url).config, folder=".", store_url=url, secret="", plugins={}, token="agl_t"),
            "agl_t",
        ),
        (order(url), SECRET),
    ):
        for name in KEYS:
            monkeypatch.setenv(name, "a-key-of-this-machine")
        _, _ = mine.open_store()
        assert [expected] == [os.environ[name] for name in KEYS if name in os.environ]


def test_worker_refuses_its_token_for_a_store_that_it_opens_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "worker_token_agent.py").write_text("async def solve(task):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "?"}\n')
    (tmp_path / "runs.db").touch()
    file = tmp_path / "experiment.toml"
    file.write_text('[experiment]\nname = "mine"\nagent = "worker_token_agent:solve"\ntrain = "tasks.jsonl"\n')
    monkeypatch.setenv("AGL_WORKER_TOKEN", "agl_token-of-the-variable")
    done = CliRunner().invoke(cli, ["worker", str(file), "--store", f"sqlite:///{tmp_path / 'runs.db'}"])
    assert 1 == done.exit_code
    assert "which checks none; give --store http://HOST:PORT" in done.output
    assert "agl_token" not in done.output


def test_token_needs_an_experiment_and_one_that_is_too_long_is_refused() -> None:
    tokens = AttemptTokens(SECRET.encode())
    with pytest.raises(ConfigError, match="is for one experiment"):
        tokens.issue_for_worker("", expires_at=1.0)
    with pytest.raises(ConfigError, match="2048 are allowed"):
        tokens.issue_for_worker("mine", expires_at=1.0, name="x" * 2000)
    longest = tokens.issue_for_worker("ä" * 256, expires_at=time.time() + 60)
    assert "ä" * 256 == tokens.verify(longest, now=time.time()).experiment
    with pytest.raises(TokenError, match=r"expired 60 s ago; make another with: agl worker-token mine"):
        tokens.verify(tokens.issue_for_worker("mine", expires_at=1000.0), now=1060.0)
