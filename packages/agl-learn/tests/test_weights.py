"""Weights on the way of a candidate, with a real model, trainer, host, gateway and learner."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.request import Request, urlopen

import pytest

from agl import PluginManager
from agl.contracts import POLICY_KEY_ENV, RolloutQuery, ServedModel, Store, VersionedPolicy
from agl.errors import ConfigError, PolicyError
from agl.schemas import ResourceVersion, Weights
from agl_inspect.records.learning import GateRules, LearningCandidate, LearningRecords
from agl_inspect.records.splits import HOSTED, SERVED, HostedVersions, ServedSplit
from agl_inspect.terminal.query import CONVERSATIONS
from agl_learn.contracts import Conversation
from agl_learn.host import Host, policy_of, run_host
from agl_learn.replay import TrialReplayer
from agl_learn.settings import LearnerFile
from agl_run import learner_of, load_config
from agl_store_sqlite import SQLiteStore

pytest.importorskip("agl_algo_torch")
pytest.importorskip("peft")
pytest.importorskip("agl_gateway")

from .weights_world import User, make_model, prepare

RECORDS = LearningRecords("support")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path)
    monkeypatch.delitem(sys.modules, "desk_agent", raising=False)
    return tmp_path


def with_file(folder: Path, work: Callable[[LearnerFile], Any], *, toml: Callable[[str], str] = str) -> Any:
    """Run a coroutine with the learner of ``desk.toml``."""
    path = folder / "desk.toml"
    path.write_text(toml(path.read_text(encoding="utf-8")), encoding="utf-8")
    config = load_config(path)
    name, settings = learner_of(config)

    async def run() -> Any:
        store = SQLiteStore(f"sqlite:///{folder}/runs/desk.db")
        manager = PluginManager.from_environment()
        try:
            return await work(
                LearnerFile(name=name, settings=settings, config=config, folder=folder, manager=manager, store=store)
            )
        finally:
            await store.close()

    return asyncio.run(run())


async def publish(file: LearnerFile, **favourites: str) -> None:
    """Publish weights that answer with their favourite word."""
    for version, favourite in favourites.items():
        place = file.folder / version
        make_model(place, seed=1, favourite=favourite)
        await file.store.publish([ResourceVersion(name="small", version=version, resource=Weights(uri=str(place)))])


def test_replay_runs_two_versions_of_a_policy_side_by_side(folder: Path) -> None:
    candidate = LearningCandidate(
        id="c1",
        number=1,
        versions={"small": "good"},
        baseline={"small": "bad"},
        origin="grpo",
        conversations=6,
        created_at=0.0,
        moves=[],
        rules=GateRules(),
    )
    talks = [Conversation(rollout_id=f"t{n}", user=f"u{n}", task={"question": "why", "said": "kind"}) for n in range(6)]

    async def replay(file: LearnerFile) -> Any:
        await publish(file, bad="rude", good="kind")
        hosted = HostedVersions(models={"bad": "elsewhere", "good": "elsewhere"})  # which the replay does not use
        await HOSTED.add(file.store, {"small": hosted})
        async with aclosing(TrialReplayer(file).pairs(candidate, talks, done=())) as pairs:
            found = [(pair.old, pair.new, pair.control) async for pair in pairs]
        rollouts = await file.store.rollouts(RolloutQuery(experiment="support-replay-c1", limit=100))
        return found, [(one.resources["small"], await versions_of(file.store, one.rollout_id)) for one in rollouts]

    found, served = with_file(folder, replay)

    assert [(0.0, 1.0, 0.0)] * 6 == found
    assert Counter({"bad": 12, "good": 6}) == Counter(pinned for pinned, _ in served)
    assert all([pinned] == versions for pinned, versions in served), served


async def versions_of(store: Store, rollout_id: str) -> list[str]:
    """Return the versions of the weights that answered the calls of a rollout."""
    spans = await store.spans(rollout_id)
    return [span.call.model_version for span in spans if span.call is not None]


def test_learner_of_a_policy_that_serves_one_version_is_refused(folder: Path) -> None:
    def endpoint(text: str) -> str:
        begin, end = text.index("[policy.small]"), text.index("[[reward]]")
        return f'{text[:begin]}[policy.small]\nuse = "openai"\nmodel = "m"\n{text[end:]}'

    async def build(file: LearnerFile) -> None:
        policy_of(file)

    with pytest.raises(ConfigError, match=r"'openai' cannot serve the old and the new weights.*\"torch\", or \"vllm\""):
        with_file(folder, build, toml=endpoint)


def test_host_serves_what_the_store_names_and_says_what_it_cannot(folder: Path) -> None:
    async def work(file: LearnerFile) -> None:
        await publish(file, old="rude", new="kind", other="short")
        missing = Weights(uri=str(folder / "nowhere"))
        await file.store.publish([ResourceVersion(name="small", version="gone", resource=missing)])
        policy = policy_of(file)
        url = (await policy.start()).base_urls[0]
        said: list[str] = []
        host = Host(file, policy, say=said.append)

        async def look(**arms: str) -> tuple[dict[str, str], list[str], list[str]]:
            share = {arm: 1 / len(arms) for arm in arms}
            versions = {arm: {"small": version} for arm, version in arms.items()}
            await SERVED.add(file.store, {"": ServedSplit(shares=share, versions=versions)})
            await host.tick()
            record = await HOSTED.get(file.store, "small")
            assert record is not None
            return record.models, list(record.problems), await asyncio.to_thread(models_at, url)

        try:
            both, left = {"old": "small@old", "new": "small@new"}, ["small", "small@old"]
            assert (both, [], ["small", "small@new", "small@old"]) == await look(production="old", candidate="new")
            # The arm of `new` has ended: gateways read that first, and then it is unloaded.
            assert ({"old": "small@old"}, [], ["small", "small@new", "small@old"]) == await look(production="old")
            assert ({"old": "small@old"}, [], left) == await look(production="old")
            assert ({"old": "small@old"}, ["gone"], left) == await look(production="old", candidate="gone")
        finally:
            await policy.stop()
        assert any("small@gone cannot be served" in line for line in said), said

    with_file(folder, work)


class Failing:
    """A policy that fails to serve some versions, of which those in `broken` were loaded before."""

    def __init__(self) -> None:
        self.broken: dict[str, Exception] = {}

    async def serve_versions(self, versions: Sequence[ResourceVersion]) -> dict[str, ServedModel]:
        for each in versions:
            if each.version in self.broken:
                raise self.broken[each.version]
        return {each.version: ServedModel(base_urls=(), model=f"small@{each.version}") for each in versions}


def test_host_tries_again_what_may_pass_and_keeps_other_versions(folder: Path) -> None:
    async def work(file: LearnerFile) -> None:
        await publish(file, old="rude", new="kind")
        versions = {"production": {"small": "old"}, "candidate": {"small": "new"}}
        await SERVED.add(file.store, {"": ServedSplit(shares={"production": 0.5, "candidate": 0.5}, versions=versions)})
        policy = Failing()
        host = Host(file, cast("VersionedPolicy", policy), say=lambda _: None)

        async def look(**broken: Exception) -> HostedVersions | None:
            policy.broken = broken
            await host.tick()
            return await HOSTED.get(file.store, "small")

        old, new = {"old": "small@old"}, {"new": "small@new"}
        assert HostedVersions(models=old) == await look(new=RuntimeError("out of memory"))
        assert HostedVersions(models={**old, **new}) == await look()
        assert HostedVersions(models=new) == await look(old=PolicyError("the server does not answer"))
        assert HostedVersions(models=new, problems={"old": "gone"}) == await look(old=ConfigError("gone"))
        await HOSTED.add(file.store, {"small": HostedVersions(models={})})  # by somebody else
        assert HostedVersions(models={**old, **new}) == await look()

    with_file(folder, work)


def test_second_host_is_refused_and_a_host_that_does_not_start_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = HostedVersions(models={"old": "small@old"})

    async def work(file: LearnerFile) -> None:
        await HOSTED.add(file.store, {"small": served})
        monkeypatch.delenv(POLICY_KEY_ENV, raising=False)
        with pytest.raises(ConfigError, match=POLICY_KEY_ENV):
            await run_host(file, port=0, say=print, stopping=asyncio.Event())
        assert served == await HOSTED.get(file.store, "small")
        monkeypatch.setenv(POLICY_KEY_ENV, "a-key-of-the-test")
        stopping, said = asyncio.Event(), list[str]()
        first = asyncio.create_task(run_host(file, port=0, say=said.append, stopping=stopping))
        async with asyncio.timeout(60):
            while not said:
                await asyncio.sleep(0.05)
        elsewhere = replace(file, folder=folder / "elsewhere")
        for other in (file, elsewhere):
            with pytest.raises(ConfigError, match="runs"):
                await run_host(other, port=0, say=print, stopping=asyncio.Event())
        stopping.set()
        await first

    with_file(folder, work)


def models_at(url: str) -> list[str]:
    request = Request(f"{url}/models", headers={"Authorization": f"Bearer {os.environ[POLICY_KEY_ENV]}"})
    with urlopen(request, timeout=60) as answer:
        return sorted(model["id"] for model in json.load(answer)["data"])


class Parts:
    """The processes of a desk, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = {name: free_port() for name in ("serve", "host")}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.settings: list[str] = []
        self.url = f"http://127.0.0.1:{self._ports['serve']}"

    def start_all(self) -> None:
        for name in ("host", "serve", "learn"):
            self.start(name)

    def start(self, name: str) -> None:
        upstream = f"small=http://127.0.0.1:{self._ports['host']}/v1,key_env=AGL_POLICY_KEY"
        store = ["--store", f"sqlite:///{self._folder}/runs/desk.db"]
        words = {
            "serve": ["serve", *store, "--port", str(self._ports["serve"]), "--upstream", upstream],
            "host": ["learn", "host", "desk.toml", "--port", str(self._ports["host"])],
            "learn": ["learn", "desk.toml", *self.settings],
        }[name]
        keys = {"AGL_POLICY_KEY": "policy-key-of-the-test", "AGL_TOKEN": "a" * 40, "AGL_CLIENT_TOKEN": "c" * 40}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", "agl", *words],
                cwd=self._folder,
                env={**os.environ, **keys},
                stdout=log,
                stderr=log,
            )

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def stop(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait(timeout=60)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in self._folder.glob("*.log"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def parts(folder: Path) -> Iterator[Parts]:
    made = Parts(folder)
    yield made
    made.stop()
    print(made.logs())


class Desk:
    """The users of a desk, who go on whatever happens to its processes."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        self._folder, self.parts = folder, parts
        self.number = 0
        self.failures: list[str] = []

    def serve_until(self, is_over: Callable[[], bool], *, wish: str, seconds: float = 900) -> None:
        end = time.monotonic() + seconds
        while not is_over():
            assert time.monotonic() < end, "it takes too long"
            user = User(self.parts.url, token="c" * 40, name=f"u{self.number % 60}")
            try:
                user.converse(self.number, wish=wish)
            except OSError as error:
                self.failures.append(str(error))
                time.sleep(0.5)
            self.number += 1
            time.sleep(0.3)  # the trainer runs with a low priority, and needs some of the processor

    def look(self, read: Callable[[Store], Any]) -> Any:
        async def opened() -> Any:
            store = SQLiteStore(f"sqlite:///{self._folder}/runs/desk.db")
            try:
                return await read(store)
            finally:
                await store.close()

        return asyncio.run(opened())

    def stages(self) -> list[str]:
        found = self.look(RECORDS.candidates.read)
        return [each.stage for each in sorted(found.values(), key=lambda each: each.number)]

    def reaches(self, stage: str) -> Callable[[], bool]:
        return lambda: stage in self.stages()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform == "win32", reason="it kills with SIGKILL")
def test_weights_learn_the_users_wish_whatever_is_killed(folder: Path, parts: Parts) -> None:
    desk = Desk(folder, parts)
    parts.start_all()
    desk.serve_until(lambda: bool(desk.look(RECORDS.rounds.read)), wish="kind")
    time.sleep(3)
    parts.kill("learn")  # while it trains
    parts.start("learn")
    desk.serve_until(desk.reaches("canary"), wish="kind")
    parts.kill("host")
    before = len(desk.failures)
    desk.serve_until(lambda: len(desk.failures) > before, wish="kind")
    parts.kill("serve")
    parts.kill("learn")
    parts.start_all()
    desk.serve_until(desk.reaches("watch"), wish="kind")
    desk.serve_until(lambda: desk.number % 40 == 0, wish="kind")

    split = desk.look(SERVED.get)
    old, new = split.versions["holdback"]["small"], split.versions["production"]["small"]
    assert "support-small-initial" == old != new
    talks = desk.look(lambda store: conversations(store))
    assert {old, new} == {pinned for pinned, _, _ in talks}
    for pinned, answered, _ in talks:
        assert answered in ([], [pinned]), (pinned, answered)
    rewards = {version: [reward for pinned, _, reward in talks if pinned == version] for version in (old, new)}
    means = {version: sum(found) / len(found) for version, found in rewards.items()}
    assert means[old] < 0.4 < 0.75 < means[new], means


async def conversations(store: Store) -> list[tuple[str, list[str], float]]:
    """Return the pinned version, the versions that answered and the rating of every rated conversation."""
    found: list[tuple[str, list[str], float]] = []
    for rollout in await store.rollouts(RolloutQuery(experiment=CONVERSATIONS, limit=2000)):
        spans = await store.spans(rollout.rollout_id)
        rewards = [span.reward.value for span in spans if span.reward is not None]
        answered = [span.call.model_version for span in spans if span.call is not None and not span.call.error]
        if rewards and "small" in rollout.resources:
            found.append((rollout.resources["small"], answered, rewards[0]))
    return found


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_harmful_weights_of_a_person_are_refused(folder: Path, parts: Parts) -> None:
    desk = Desk(folder, parts)
    with_file(folder, lambda file: publish(file, good="kind"))
    parts.settings = ["--set", "learn.support.every=1000"]  # no round of training in this test
    parts.start_all()
    desk.serve_until(lambda: desk.look(SERVED.get) is not None, wish="kind")
    desk.serve_until(lambda: desk.number % 50 == 0, wish="kind")
    with_file(folder, lambda file: publish(file, harmful="rude"))
    words = ["resources", "promote", "small", "harmful", "--label", "candidate", "--store", "sqlite:///runs/desk.db"]
    subprocess.run([sys.executable, "-m", "agl", *words], cwd=folder, check=True, capture_output=True)
    desk.serve_until(desk.reaches("refused"), wish="kind")
    assert {"production": {"small": "good"}} == desk.look(SERVED.get).versions
