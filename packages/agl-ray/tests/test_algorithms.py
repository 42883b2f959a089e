"""Algorithms that run their steps in other processes, on the reserved resources."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agl.errors import AglError, ConfigError, NotFoundError
from agl_run import FitResult, Quiet, Trainer, load_config
from agl_run.run.collector import Collector

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of Ray's own sockets

RUNNER = '[runner]\nuse = "ray"\n\n[runner.params]\nmax_workers = 1\nwait_s = 2\n\n'


def _algorithm(name: str, tunes: str, resources: str, params: str = "steps = 2") -> str:
    return (
        f'[[algorithm]]\nuse = "pacing"\nname = "{name}"\ntunes = "{tunes}"\nresources = {{ {resources} }}\n'
        f"params = {{ {params} }}\n\n"
    )


def _fit(given: Any, **options: Any) -> FitResult:
    config = load_config(given.file)
    return Trainer.from_config(config, folder=given.file.parent, progress=Quiet()).fit(**options)


def _notes(given: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (given.file.parent / "notes.jsonl").read_text().splitlines()]


def test_two_algorithms_with_a_gpu_each_never_share_one(ray: Any, experiment: Any, tmp_path: Path) -> None:
    more = _algorithm("left", "style", "num_gpus = 1", "steps = 3, work_s = 0.5")
    more += _algorithm("right", "other", "num_gpus = 1", "steps = 3, work_s = 0.5")
    more += '[resource.other]\ntemplate = "!"\n\n[schedule]\nmode = "concurrent"\n\n'
    given = experiment(tmp_path, more=more + RUNNER)
    result = _fit(given)
    notes = _notes(given)
    gpus = {name: {note["gpus"] for note in notes if note["name"] == name} for name in ("left", "right")}
    processes = {name: {note["pid"] for note in notes if note["name"] == name} for name in ("left", "right")}
    assert {"left": 3, "right": 3} == result.steps
    assert {"0", "1"} == {*gpus["left"], *gpus["right"]}
    assert gpus["left"].isdisjoint(gpus["right"])
    assert processes["left"].isdisjoint(processes["right"])
    assert os.getpid() not in {*processes["left"], *processes["right"]}


def test_algorithm_sees_what_it_published_and_can_be_continued(ray: Any, experiment: Any, tmp_path: Path) -> None:
    given = experiment(tmp_path, more=_algorithm("pacing", "style", "num_cpus = 0.5") + RUNNER)
    assert {"pacing": 2} == _fit(given).steps
    given.file.write_text(given.file.read_text().replace("steps = 2", "steps = 3"))
    assert [1, 2] == [note["step"] for note in _notes(given)]
    assert "small-1-pacing-1" == _notes(given)[1]["live"]["style"]


def test_algorithm_names_the_processor_of_its_pictures(
    ray: Any, experiment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []
    monkeypatch.setattr(Collector, "read_pictures", lambda _, processor: named.append(processor))
    _fit(experiment(tmp_path, more=_algorithm("pacing", "style", "num_cpus = 0.5", "steps = 1") + RUNNER))
    assert ["SomeProcessor 1.0"] == named


def test_two_algorithms_take_turns_on_one_gpu_only_with_room_for_both(
    ray: Any, experiment: Any, tmp_path: Path
) -> None:
    more = _algorithm("left", "style", "num_gpus = 2") + _algorithm("right", "other", "num_gpus = 1")
    given = experiment(tmp_path, more=more + '[resource.other]\ntemplate = "!"\n\n' + RUNNER)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="'right' asks for 1 CPU, 1 GPU besides the rest of the experiment, and the"):
        _fit(given)
    assert time.monotonic() - began < 5 + 20  # a busy machine


def test_room_that_others_hold_is_an_error_within_seconds(ray: Any, experiment: Any, tmp_path: Path) -> None:
    from ray.util import placement_group, remove_placement_group

    others = placement_group([{"GPU": 2}])
    assert others.wait(timeout_seconds=60)
    given = experiment(tmp_path, more=_algorithm("pacing", "style", "num_gpus = 1") + RUNNER)
    with pytest.raises(ConfigError, match=r"no room within 2 s: algorithm 'pacing' asks for .*Wait until others end"):
        _fit(given)
    remove_placement_group(others)


def test_algorithm_that_needs_the_policy_itself_is_refused(ray: Any, experiment: Any, tmp_path: Path) -> None:
    more = _algorithm("pacing", "style", "num_cpus = 0.5", "steps = 1, asks_policy = true")
    given = experiment(tmp_path, more=more + RUNNER)
    with pytest.raises(ConfigError, match=r"uses 'engine' of the policy 'main_llm'.*remove \[algorithm.resources\]"):
        _fit(given)


@pytest.mark.parametrize(
    ("breaks", "kind", "said"),
    [
        ("store", NotFoundError, "unknown rollout 'nobody'"),
        ("step", AglError, "sent what cannot be read here: agl_pacing.OneWayError: the client got 429"),
        ("answer", AglError, "the client got 429"),
        ("words", AglError, "'pacing' cannot be heard or answered on the Ray cluster: .*no number"),
    ],
)
def test_error_of_an_algorithm_ends_the_run_though_it_cannot_be_sent(
    breaks: str, kind: type[AglError], said: str, ray: Any, experiment: Any, tmp_path: Path
) -> None:
    more = _algorithm("pacing", "style", "num_cpus = 0.5", f'steps = 1, breaks = "{breaks}"')
    given = experiment(tmp_path, tasks=2, more=more + RUNNER)
    with pytest.raises(kind, match=said) as caught:
        _fit(given)
    assert "process of the algorithm" not in str(caught.value)


def test_algorithm_whose_process_dies_ends_the_run_and_is_continued(ray: Any, experiment: Any, tmp_path: Path) -> None:
    more = _algorithm("pacing", "style", "num_cpus = 0.5", "steps = 2, work_s = 1")
    given = experiment(tmp_path, more=more + RUNNER)
    killer = "import os, signal; open('killed', 'x'); os.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "kill.py").write_text(killer)
    import signal
    from concurrent.futures import ThreadPoolExecutor

    from ray._private.state import actors

    from agl_testing.waiting import wait_until

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_fit, given)
        wait_until(lambda: (tmp_path / "notes.jsonl").exists())
        (host,) = [
            one for one in actors().values() if one["ActorClassName"] == "AlgorithmHost" and one["State"] == "ALIVE"
        ]
        os.kill(host["Pid"], signal.SIGKILL)
        with pytest.raises(AglError, match=r"process of the algorithm 'pacing' .* ended: .*continue with --resume"):
            running.result()
    assert {"pacing": 2} == _fit(given, resume=True).steps
    assert [1, 2] == sorted({note["step"] for note in _notes(given)})
