"""Workers elsewhere: real processes with homes and folders of their own, killed, cut off and misled."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agl.contracts import RolloutQuery
from agl.schemas import Attempt, Rollout
from agl_store_sqlite._store import SQLiteStore
from agl_testing.waiting import wait_until

from .conftest import PATIENT
from .test_crash import check_end, wait_for_a_step

StartAgl = Callable[..., subprocess.Popen[str]]


def free_port() -> int:
    """A port that was free a moment ago."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def leave_to_workers(file: Path, port: int, *, more: str = "") -> str:
    """Let an experiment run no attempt itself and listen at ``port``; returns the gateway's URL."""
    text = file.read_text().replace("concurrency = 3", f"concurrency = 0{more}")
    file.write_text(f'{text}\n[gateway]\nparams = {{ host = "0.0.0.0", port = {port} }}\nadvertise = "127.0.0.1"\n')
    return f"http://127.0.0.1:{port}"


def elsewhere(file: Path, name: str) -> Path:
    """A copy of the experiment's files in another folder, without its data; returns the copy's experiment file."""
    folder = file.parent.parent / name
    folder.mkdir()
    for wanted in (file.name, "toy_agent.py"):
        if (file.parent / wanted).exists():
            shutil.copy(file.parent / wanted, folder)
    return folder / file.name


def store_of(file: Path) -> Path:
    """The experiment's store."""
    return file.parent / "runs" / "toy.db"


def rollouts_of(file: Path) -> list[Rollout]:
    """Everything that was asked for."""
    return [rollout for rollout, _ in tried(file)]


def attempts_of(file: Path) -> list[Attempt]:
    """Everything that was tried."""
    return [attempt for _, attempts in tried(file) for attempt in attempts]


def tried(file: Path) -> list[tuple[Rollout, list[Attempt]]]:
    """Every rollout with its attempts."""

    async def work() -> list[tuple[Rollout, list[Attempt]]]:
        store = SQLiteStore(f"sqlite:///{store_of(file)}")
        rollouts = await store.rollouts(RolloutQuery(experiment="toy", limit=10_000))
        found = [(rollout, await store.attempts(rollout.rollout_id)) for rollout in rollouts]
        await store.close()
        return found

    return asyncio.run(work())


def pid_of(attempt: Attempt) -> int:
    """The worker that ran it."""
    return int(attempt.worker.split(":")[1])


def end_of(process: subprocess.Popen[str], *, seconds: float = 180.0) -> tuple[str, str]:
    """The output of a process that must end with status 0."""
    out, err = process.communicate(timeout=seconds)
    assert 0 == process.returncode, out + err
    return out, err


def test_workers_elsewhere_run_what_a_local_run_would(agl: StartAgl, experiment: Callable[..., Path]) -> None:
    file = experiment(steps=4, pause_s=0.3)
    url = leave_to_workers(file, free_port())
    homes = [elsewhere(file, name) for name in ("first", "second")]
    options = {"cwd": homes[0].parent, "XDG_STATE_HOME": str(homes[0].parent)}
    early = agl("worker", str(homes[0]), "--store", url, "--json", **options)
    trainer = agl("run", str(file), "--quiet", cwd=file.parent)
    isolated = ("--set", "runner.use=process", "--concurrency", "2")
    late = agl("worker", str(homes[1]), "--store", url, *isolated, cwd=homes[1].parent)
    wait_for_a_step(file, trainer)
    os.kill(trainer.pid, signal.SIGSTOP)  # nobody hears of it for a while, as if the network were gone
    time.sleep(4)
    os.kill(trainer.pid, signal.SIGCONT)
    _, err = end_of(trainer)
    out, _ = end_of(early)
    said, _ = end_of(late)

    assert "" == err
    events = [json.loads(line)["event"] for line in out.splitlines()]
    assert ["joined", "finished"] == [event for event in events if event not in ("waiting", "progress")]
    assert "experiment 'toy' is finished" in said
    assert "process, 2 at once" in said
    attempts = attempts_of(file)
    assert {1} == {attempt.number for attempt in attempts}
    assert {early.pid, late.pid} >= {pid_of(attempt) for attempt in attempts}
    check_end(file, steps=4)


def test_workers_without_the_key_run_the_one_experiment_that_their_token_is_for(
    agl: StartAgl, experiment: Callable[..., Path]
) -> None:
    file = experiment(steps=2)
    url = leave_to_workers(file, free_port())
    tokens = [
        end_of(agl("worker-token", name, "--valid", "1h", cwd=file.parent))[0].strip() for name in ("toy", "other")
    ]
    homes = [elsewhere(file, name) for name in ("mine", "foreign")]
    mine, foreign = (
        # an empty key is refused by whatever would sign with it
        agl("worker", str(home), "--store", url, *more, cwd=home.parent, AGL_SECRET="", AGL_WORKER_TOKEN=token)
        for home, token, more in zip(homes, tokens, (("--set", "runner.use=process"), ()), strict=True)
    )
    trainer = agl("run", str(file), "--quiet", cwd=file.parent)
    assert "" == end_of(trainer)[1]
    assert "experiment 'toy' is finished" in end_of(mine)[0]
    _, refused = foreign.communicate(timeout=180)
    assert 0 != foreign.returncode
    assert "asks for experiment 'toy'; this worker's token of experiment 'other' is for no other" in refused
    assert {mine.pid} == {pid_of(attempt) for attempt in attempts_of(file)}
    check_end(file, steps=2)


def test_killed_worker_and_killed_trainer_cost_no_rollout(
    agl: StartAgl, experiment: Callable[..., Path], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    wait = f"    while os.path.exists({str(gate)!r}):\n        time.sleep(0.05)\n"
    agent = f"import os\nimport time\n{PATIENT}".replace("    with openai", f"{wait}    with openai")
    file = experiment(steps=3, agent=agent)
    url = leave_to_workers(file, free_port(), more="\nmax_attempts = 2")
    homes = [elsewhere(file, name) for name in ("doomed", "leaving", "staying")]
    trainer = agl("run", str(file), "--quiet", cwd=file.parent)
    words = ("--store", url, "--stay", "--concurrency", "2")
    doomed, leaving, staying = workers = [agl("worker", str(home), *words, cwd=home.parent) for home in homes]
    wait_until(store_of(file).exists)
    wait_until(lambda: {worker.pid for worker in workers} <= {pid_of(attempt) for attempt in attempts_of(file)})
    doomed.kill()
    doomed.communicate()
    leaving.terminate()
    said, _ = end_of(leaving)
    trainer.kill()
    trainer.communicate()
    again = agl("run", str(file), "--quiet", "--resume", cwd=file.parent)
    gate.unlink()
    end_of(again)
    staying.terminate()
    heard, _ = end_of(staying)

    assert said.endswith("stopped; running attempts were given back\n")
    assert 2 == heard.count("joined experiment 'toy'")
    lost = [attempt for attempt in attempts_of(file) if pid_of(attempt) in (doomed.pid, leaving.pid)]
    assert {"lost"} == {attempt.status for attempt in lost}
    check_end(file, steps=3)


def test_worker_that_cannot_take_part_says_why(agl: StartAgl, experiment: Callable[..., Path]) -> None:
    file = experiment(steps=1)
    port = free_port()
    url = leave_to_workers(file, port)
    trainer = agl("run", str(file), cwd=file.parent)
    wait_until(store_of(file).exists)
    copy = elsewhere(file, "elsewhere")
    other = copy.with_name("other.toml")
    other.write_text(copy.read_text().replace('hidden = ["answer"]', "hidden = []"))
    store = f"sqlite:///{store_of(file)}"

    def refused(*words: str, **more: str) -> subprocess.Popen[str]:
        return agl("worker", *words, cwd=copy.parent, **more)

    closed = f"http://127.0.0.1:{free_port()}"
    found = {
        "no store": refused(str(copy)),
        "secret": refused(str(copy), "--store", store, AGL_SECRET="y" * 32),
        "store's secret": refused(str(copy), "--store", url, AGL_SECRET="y" * 32),
        "gateway": refused(str(copy), "--store", store, "--gateway", closed),
        "settings": refused(str(other), "--store", url),
    }
    errors = {}
    for name, process in found.items():
        _, errors[name] = process.communicate(timeout=120)
        assert 1 == process.returncode, name
        assert "Traceback" not in errors[name]
    assert f"there is no store sqlite:///{copy.parent / 'runs' / 'toy.db'} on this machine" in errors["no store"]
    assert "it signs with another secret. Set AGL_SECRET to the same value" in errors["secret"]
    assert "--gateway" not in errors["secret"]
    assert "refuses the token signed with this machine's AGL_SECRET" in errors["store's secret"]
    assert f"the gateway {closed} of the experiment on" in errors["gateway"]
    assert "give its address with --gateway" in errors["gateway"]
    assert 'experiment.hidden is ["answer"] there and [] here' in errors["settings"]
    assert {"queued"} == {rollout.status for rollout in rollouts_of(file)}
    assert trainer.stdout is not None
    assert any("rollouts wait and no worker claims them" in line for line in trainer.stdout)
    trainer.terminate()
    trainer.communicate(timeout=60)


PROGRAM = """
import json
import os
import sys
import urllib.request

task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["question"]}]
key = "Bearer " + os.environ["OPENAI_API_KEY"]
for _ in range(2):
    body = json.dumps({"model": "scripted", "messages": messages}).encode()
    headers = {"Authorization": key, "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
print(text)
"""


def test_commands_run_elsewhere_with_a_served_store(agl: StartAgl, experiment: Callable[..., Path]) -> None:
    file = experiment(steps=2, runner="command", agent=PROGRAM)
    port = free_port()
    leave_to_workers(file, free_port())
    text = file.read_text().replace('"toy_agent:solve"', json.dumps([sys.executable, "toy_agent.py"]))
    file.write_text(text.replace("sqlite:///runs/toy.db", f"http://127.0.0.1:{port}"))
    copy = elsewhere(file, "elsewhere")
    token = {"AGL_TOKEN": "an-admin-token-of-the-tests"}
    words = ("--store", f"sqlite:///{store_of(file)}", "--port", str(port))
    server = agl("serve", *words, cwd=file.parent, **token)
    worker = agl("worker", str(copy), cwd=copy.parent, **token)
    trainer = agl("run", str(file), "--quiet", cwd=file.parent, **token)
    end_of(trainer)
    said, _ = end_of(worker)
    server.terminate()
    end_of(server)

    assert "rollouts finished: 12 (12 succeeded) here" in said
    check_end(file, steps=2)
