"""The setting ``model`` of a policy that loads weights: missing folders, and hubs that do not answer."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agl import PluginManager, PolicyEntry, hookimpl
from agl.errors import ConfigError
from agl_run import Trainer, policy
from agl_run.config.sections import PolicyConfig
from agl_run.parts.models import policy_params
from agl_run.plan import Plan


class Plugin:
    @hookimpl
    def agl_policies(self) -> list[PolicyEntry]:
        factories = {"fixed": dict, "slow": slow}
        trainable = PolicyEntry(name="trainable", factory=dict, trains=True)
        return [trainable, *(PolicyEntry(name=name, factory=made) for name, made in factories.items())]


def slow(name: str, model: str) -> None:
    """Stand for a policy that reads a model, which would hold up a loop."""
    raise ConfigError(f"built {'in' if asyncio._get_running_loop() else 'outside'} the event loop")


def solve(task: dict[str, int]) -> float:
    return 1.0


def plan(folder: Path, served: PolicyConfig) -> Plan:
    manager = PluginManager()
    manager.register(Plugin(), name="toy")
    trainer = Trainer(store="memory://", policies={"main": served}, plugins=manager, folder=folder)
    return trainer.plan(solve, [{"q": 1}])


def given(folder: Path, model: str, use: str = "trainable", **params: str) -> object:
    return policy_params(plan(folder, policy(use, model=model, **params)), "main")["model"]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, and a hub at which no server listens."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_USE_MODELSCOPE", "VERL_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models" / "tiny").mkdir(parents=True)


def test_run_builds_a_policy_outside_of_the_event_loop(tmp_path: Path) -> None:
    manager = PluginManager()
    manager.register(Plugin(), name="toy")
    served = {"main": policy("slow", model="m")}
    trainer = Trainer(store="memory://", policies=served, plugins=manager, folder=tmp_path)
    with pytest.raises(ConfigError, match="built outside the event loop"):
        trainer.fit(solve, [{"q": 1}])


def test_folder_is_looked_for_beside_the_experiment(tmp_path: Path) -> None:
    expected = str(tmp_path / "models" / "tiny")
    assert (expected, expected) == (given(tmp_path, "models/tiny"), given(tmp_path / "models", "./tiny"))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("models/tinny", r"there is no 'tinny' in '{folder}/models'; did you mean 'tiny'\? Give a folder in Hugging"),
        ("./modles/tiny", r"there is no 'modles' in '{folder}'; did you mean 'models'\?"),
        ("runs/sft/weights", r"there is no 'runs' in '{folder}'; it has models\. Give a folder"),
        ("{folder}/models/tiny/deep", r"there is no 'deep' in '{folder}/models/tiny'; it has no folders\."),
        ("~/no-such-model-of-mine", r"there is no 'no-such-model-of-mine' in"),
    ],
)
def test_path_without_a_folder_is_refused_with_the_closest_name(model: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says.replace("{folder}", str(tmp_path))) as raised:
        given(tmp_path, model.replace("{folder}", str(tmp_path)))
    assert str(raised.value).startswith("[policy.main] model = ")


def test_file_is_refused_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny" / "config.json").touch()
    with pytest.raises(ConfigError, match=f"is a file, and a model is the folder '{tmp_path}/models/tiny'"):
        given(tmp_path, "models/tiny/config.json")


def test_hub_that_does_not_answer_is_reported_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"/some/model'; no model of that name is in .*Connection refused"):
        given(tmp_path, "some/model")
    assert time.monotonic() - began < 10


def test_hub_of_the_policys_own_server_is_asked(tmp_path: Path) -> None:
    served = PolicyConfig(use="trainable", params={"model": "some/model", "env": {"HF_HUB_OFFLINE": "1"}})
    assert "some/model" == policy_params(plan(tmp_path, served), "main")["model"]


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "VLLM_USE_MODELSCOPE"])
def test_no_hub_is_asked_where_the_libraries_ask_none(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert "some/model" == given(tmp_path, "some/model")


def test_model_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    (tmp_path / "cache" / "models--some--model" / "snapshots").mkdir(parents=True)
    assert "some/model" == given(tmp_path, "some/model")


def test_servers_that_run_already_may_have_folders_of_their_own(tmp_path: Path) -> None:
    assert "models/other" == given(tmp_path, "models/other", base_url="http://127.0.0.1:1/v1")


def test_model_of_a_policy_that_takes_no_weights_is_a_name(tmp_path: Path) -> None:
    assert "models/other" == given(tmp_path, "models/other", use="fixed")


class Refuses(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a hub that requires a token."""
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.usefixtures("hub")
def test_model_that_a_hub_keeps_to_itself_is_left_to_the_library_with_the_token(tmp_path: Path) -> None:
    assert "some/model" == given(tmp_path, "some/model")
