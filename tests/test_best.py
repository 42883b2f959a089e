"""An experiment keeps the scores of its versions, ends with the best of them, and goes back to them on a collapse."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

import agl
from agl import semconv
from agl.algorithms import algorithm
from agl.contracts import RolloutQuery, Store
from agl.schemas import PromptTemplate, Rollout, Span
from agl_inspect.advice.suggestions import read_alerts
from agl_inspect.records.validations import read_validations
from agl_inspect.terminal.program import cli
from agl_inspect.text import parts_text
from agl_run import FitResult, Progress, Quiet
from agl_store_sqlite._store import SQLiteStore
from agl_testing.plugins import PluginFolder

TASKS = 20

PLUGIN = '''
import os
import signal
from pathlib import Path

import agl
from agl.contracts import StepReport
from agl.schemas import PromptTemplate
from agl_testing.toys import ToyAlgorithm


class Scripted(ToyAlgorithm):
    """Publishes the text of each step; a text is the share of the validation tasks that it solves."""

    def __init__(self, *, texts, kept_in="", dies_in=""):
        self._texts, self._kept_in, self._dies_in = texts, kept_in, dies_in
        self._step, self._rate, self._from = 0, 1.0, 0

    async def step(self):
        context, self._step = self._context, self._step + 1
        collected = await context.collect(context.train, step=self._step)
        text = self._texts[self._step - 1]
        if text:
            await context.publish(context.tunes[0], PromptTemplate(template=text), step=self._step)
        if self._kept_in:
            with Path(self._kept_in).open("a") as file:
                file.write(f"{self._step}: {sorted(context.kept())}\\n")
        is_finished = self._step == len(self._texts)
        return StepReport(
            step=self._step,
            is_finished=is_finished,
            trained=tuple(episode.rollout.rollout_id for episode in collected.episodes),
            stop_reason="all texts are published" if is_finished else "",
        )

    def state(self):
        return {"step": self._step, "rate": self._rate, "from": self._from}

    async def restore(self, state):
        self._step, self._rate, self._from = state["step"], state["rate"], state["from"]

    def has_more(self, state, *, tasks, sources_go_on):
        return state["step"] < len(self._texts)


class Reversible(Scripted):
    """One that can go back."""

    async def go_back(self, state, *, rate):
        if self._dies_in and not Path(self._dies_in).exists():
            Path(self._dies_in).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._rate, self._from = rate, state.get("step", 0)


@agl.hookimpl
def agl_algorithms():
    for name, factory in (("scripted", Scripted), ("reversible", Reversible)):
        yield agl.AlgorithmEntry(name=name, factory=factory, tunes=("prompt_template",), needs_token_ids=False)
'''


def solve(task: int, prompt: PromptTemplate, rollout: Rollout) -> float:
    """Solve the first tasks, as many as the prompt's share says; a second share is that of fresh rollouts."""
    shares = prompt.template.split("/")
    share = shares[-1] if "-final-" in rollout.rollout_id else shares[0]
    return float(task < float(share) * TASKS)


class Lines(Quiet):
    """Keeps the lines that a run says."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def about(self, word: str) -> list[str]:
        """Return the lines with a word in them."""
        return [line for line in self.lines if word in line]


@pytest.fixture
def fit(agl_plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """``fit("0.5", "0.9")`` runs an experiment whose algorithm publishes these texts, and validates every step."""
    monkeypatch.setenv("AGL_SECRET", "x" * 32)
    agl_plugins.install(PLUGIN, name="scripts")

    def run(
        *texts: str,
        first: str = "0.1",
        use: str = "scripted",
        resume: bool = False,
        progress: Progress | None = None,
        agent: Callable[..., float] = solve,
        params: dict[str, Any] | None = None,
        **section: Any,
    ) -> FitResult:
        settings: dict[str, Any] = {"validate_every": 1, **section}
        trainer = agl.Trainer(
            name="kept",
            algorithm=algorithm(use, tunes="prompt", texts=list(texts), **(params or {})),
            initial_resources={"prompt": PromptTemplate(template=first)},
            store=f"sqlite:///{tmp_path}/runs.db",
            folder=tmp_path,
            progress=progress or Quiet(),
            **settings,
        )
        return trainer.fit(agent, [0], list(range(TASKS)), resume=resume)

    return run


def look(tmp_path: Path, read: Callable[[Store], Any]) -> Any:
    """Return what an asynchronous function reads in the experiment's store."""

    async def work() -> Any:
        store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")
        try:
            return await read(store)
        finally:
            await store.close()

    return asyncio.run(work())


async def best_version(store: Store) -> str:
    """The version that the label ``best`` points at."""
    return {move.label: move.version for move in await store.labels("prompt")}["best"]


async def saved_state(store: Store) -> dict[str, Any]:
    """The state of the experiment's algorithm."""
    [(_, data)] = (await store.load_state("experiment/kept/1/algorithm/")).items()
    return msgspec.json.decode(data)


def test_every_validated_version_keeps_its_score(fit: Callable[..., Any], tmp_path: Path) -> None:
    fit("0.2", "0.9", "0.1")

    scores = look(tmp_path, lambda store: store.scores("prompt"))

    assert [
        ("kept-1-initial", 0.1),
        ("kept-1-scripted-1", 0.2),
        ("kept-1-scripted-2", 0.9),
        ("kept-1-scripted-3", 0.1),
    ] == [(score.version, pytest.approx(score.mean)) for score in scores]
    assert {("validation", TASKS)} == {(score.how, score.n) for score in scores}
    assert all(score.low < score.mean < score.high for score in scores)


def test_scores_keep_the_parts_of_their_rewards(fit: Callable[..., Any], tmp_path: Path) -> None:
    def graded(task: int, prompt: PromptTemplate, rollout: Rollout) -> float:
        share = solve(task, prompt, rollout)
        agl.emit_reward({"right": share, "right.exact": 0.0, "form": 1.0}, primary="right")
        return share

    fit("0.2", "0.9", agent=graded)

    scores = look(tmp_path, lambda store: store.scores("prompt"))
    assert ["right 2 of 20, form 20 of 20", "right 4 of 20, form 20 of 20", "right 18 of 20, form 20 of 20"] == [
        parts_text(score.parts) for score in scores
    ]
    (kept, *_) = look(tmp_path, lambda store: read_validations(store, "kept", 1))
    assert kept.parts == scores[0].parts


@pytest.mark.parametrize(("final", "live", "after"), [("best", 2, 0.9), ("last", 3, 0.4)])
def test_best_or_last_versions_are_live_at_the_end(
    final: str, live: int, after: float, fit: Callable[..., Any], tmp_path: Path
) -> None:
    result = fit("0.5", "0.9", "0.4", final=final)

    assert {"prompt": f"kept-1-scripted-{live}"} == result.resources
    assert (0.1, after, 0.4) == (result.before, result.after, result.last)
    assert (2 if final == "best" else None) == result.kept_step
    assert (0.9, 2) == (result.best, result.best_step)
    assert "kept-1-scripted-2" == look(tmp_path, best_version)


def test_bare_name_means_the_live_version_until_a_person_publishes_another(
    fit: Callable[..., Any], tmp_path: Path
) -> None:
    fit("0.9", "0.1")
    store = ["--store", f"sqlite:///{tmp_path}/runs.db"]

    def say(*words: str) -> str:
        result = CliRunner().invoke(cli, [*words, *store])
        assert 0 == result.exit_code, result.output
        return result.output

    assert "chosen because no version was named: live in kept" in say("resources", "show", "prompt")
    assert "0.9" == say("resources", "show", "prompt").splitlines()[-1]
    exported = say("data", "export", "prompt", "--format", "text").splitlines()
    assert ["no version was named: prompt@kept-1-scripted-1 is live in kept", "0.9"] == exported[:2]
    assert "kept-1-scripted-1 " in say("resources", "list")

    (tmp_path / "text").write_text("0.5")
    say("resources", "publish", "prompt", str(tmp_path / "text"))
    assert "0.5" == say("resources", "show", "prompt").splitlines()[-1]


def test_fresh_rollouts_decide_between_versions_that_are_close(fit: Callable[..., Any], tmp_path: Path) -> None:
    progress = Lines()
    result = fit("0.80/0.40", "0.75/0.70", "0.70/0.60", "0.1", progress=progress)

    assert {"prompt": "kept-1-scripted-2"} == result.resources
    assert (0.7, 0.1, 2) == (result.after, result.last, result.kept_step)
    assert "kept-1-scripted-2" == look(tmp_path, best_version)
    scores = {score.version[-1]: score for score in look(tmp_path, lambda store: store.scores("prompt"))}
    assert [("fresh validation", 0.4), ("fresh validation", 0.7), ("fresh validation", 0.6), ("validation", 0.1)] == [
        (scores[step].how, pytest.approx(scores[step].mean)) for step in "1234"
    ]
    [said] = progress.about("fresh rollouts decide")
    assert said.startswith("validation rewards that are close to each other: 0.800 after step 1, 0.750 after step 2,")


def test_last_version_takes_part_in_the_fresh_measurement_unless_it_has_fallen(fit: Callable[..., Any]) -> None:
    progress = Lines()
    result = fit("0.85/0.40", "0.80/0.50", "0.75/0.60", "0.70/0.70", progress=progress)

    assert ({"prompt": "kept-1-scripted-4"}, 0.7, None) == (result.resources, result.after, result.kept_step)
    assert ["after step 1: 0.400", "after step 2: 0.500", "after step 4: 0.700"] == [
        line.removeprefix("fresh rollouts of the versions ") for line in progress.about("fresh rollouts of")
    ]


def test_best_last_version_costs_no_further_rollouts(fit: Callable[..., Any], tmp_path: Path) -> None:
    result = fit("0.8", "0.85")

    assert (0.85, None) == (result.after, result.kept_step)
    rollouts = look(tmp_path, lambda store: store.rollouts(RolloutQuery(experiment="kept", mode="val", limit=1000)))
    assert 3 * TASKS == len(rollouts)


@pytest.mark.parametrize(
    ("first", "text", "version"),
    [
        ("0.9", "0.2", "initial"),
        ("0.9", "0.8", "scripted-1"),
        ("0.8", "0.9", "scripted-1"),
        ("0.5", "0.5", "scripted-1"),
        ("0.9", "0.5", "initial"),
        ("0.9", "0.6", "scripted-1"),
    ],
)
def test_without_validations_between_the_end_stays_unless_it_is_clearly_worse(
    first: str, text: str, version: str, fit: Callable[..., Any], tmp_path: Path
) -> None:
    assert {"prompt": f"kept-1-{version}"} == fit(text, first=first, validate_every=0).resources
    rollouts = look(tmp_path, lambda store: store.rollouts(RolloutQuery(experiment="kept", mode="val", limit=1000)))
    assert 2 * TASKS == len(rollouts)


def test_experiment_that_is_given_more_steps_continues_from_its_last_versions(
    fit: Callable[..., Any], tmp_path: Path
) -> None:
    fit("0.9", "0.2")
    result = fit("0.9", "0.2", "0.3", resume=True)

    assert {"prompt": "kept-1-scripted-1"} == result.resources
    versions = {v.version: v.parent for v in look(tmp_path, lambda store: store.resources("prompt"))}
    assert "kept-1-scripted-2" == versions["kept-1-scripted-3"]


def test_algorithm_knows_the_steps_whose_files_must_stay(fit: Callable[..., Any], tmp_path: Path) -> None:
    fit("0.9", "0.2", "0.3", "0.85", "0.1", params={"kept_in": str(tmp_path / "kept.txt")}, on_collapse="continue")

    assert ["1: [0]", "2: [1]", "3: [1]", "4: [1]", "5: [1, 4]"] == (tmp_path / "kept.txt").read_text().splitlines()


def test_first_fall_is_told_and_the_second_in_a_row_goes_back(fit: Callable[..., Any], tmp_path: Path) -> None:
    progress = Lines()
    result = fit("0.9", "0.2", "0.1", "0.95", use="reversible", progress=progress)

    first, second = progress.about("has fallen")
    assert "if the next validation shows that too, training goes back to the best versions" in first
    assert (
        "the validation reward has fallen: 0.100 after step 3, and 0.900 after step 1, evidence 2,820 to 1, "
        "twice in a row: back to the versions after step 1; reversible: 0.5 times the configured learning rate"
    ) == second
    alerts = look(tmp_path, lambda store: read_alerts(store, "kept", 1))
    assert [("collapse", 3, second)] == [(alert.kind, alert.found.step, alert.found.evidence) for alert in alerts]
    assert {"step": 4, "rate": 0.5, "from": 1} == look(tmp_path, saved_state)["state"]
    assert ({"prompt": "kept-1-reversible-4"}, 0.95) == (result.resources, result.after)
    rollouts = look(tmp_path, lambda store: store.rollouts(RolloutQuery(experiment="kept", mode="train")))
    ran_with = {r.metadata["step"]: r.resources["prompt"] for r in rollouts}
    assert "kept-1-reversible-1" == ran_with[4]


def test_collapse_before_the_first_best_step_goes_back_to_the_beginning(
    fit: Callable[..., Any], tmp_path: Path
) -> None:
    fit("0.0", "0.1", "0.8", first="0.9", use="reversible")

    assert {"step": 3, "rate": 0.5, "from": 0} == look(tmp_path, saved_state)["state"]


def test_every_further_collapse_halves_the_steps_until_the_run_stops(fit: Callable[..., Any], tmp_path: Path) -> None:
    progress = Lines()
    result = fit("0.9", *["0.1"] * 12, use="reversible", progress=progress)

    assert ["0.5", "0.25", "0.125"] == [line.split(" times the")[0].split()[-1] for line in progress.about("times the")]
    [said] = progress.about("the run stops")[-1:]
    assert "training cannot go back, because it went back 3 times already" in said
    assert ({"reversible": 9}, 0.9) == (result.steps, result.after)


@pytest.mark.parametrize(
    ("use", "chosen", "steps", "said"),
    [
        ("scripted", "rollback", 3, "scripted cannot continue from an earlier state; the run stops"),
        ("reversible", "stop", 3, "evidence 2,820 to 1, twice in a row; the run stops"),
        ("reversible", "continue", 4, 'training goes on, because on_collapse is "continue"'),
    ],
)
def test_collapse_stops_where_it_must(
    use: str, chosen: str, steps: int, said: str, fit: Callable[..., Any], tmp_path: Path
) -> None:
    progress = Lines()
    result = fit("0.9", "0.1", "0.1", "0.1", use=use, on_collapse=chosen, progress=progress)

    assert ({use: steps}, 0.9) == (result.steps, result.after)
    assert 1 <= len(progress.about(said))
    [alert] = look(tmp_path, lambda store: read_alerts(store, "kept", 1))
    assert said in alert.found.evidence
    state = look(tmp_path, saved_state)
    assert state["is_finished"]
    assert ("has fallen" in state["stop_reason"]) == (chosen != "continue")


def test_stopped_run_continues_when_it_is_told_to(fit: Callable[..., Any]) -> None:
    texts = ("0.9", "0.1", "0.1", "0.1")
    fit(*texts, on_collapse="stop")

    assert {"scripted": 4} == fit(*texts, on_collapse="continue", resume=True).steps


def fade(task: int, prompt: PromptTemplate, rollout: Rollout) -> float:
    """Solve every task until the second step, and none afterwards, whatever the prompt says."""
    del task, prompt
    return float(int(str(rollout.metadata["step"])) < 2)


def test_fall_without_new_versions_is_told_and_goes_nowhere(fit: Callable[..., Any], tmp_path: Path) -> None:
    progress = Lines()
    result = fit("", "", "", "", use="reversible", agent=fade, progress=progress)

    assert progress.about("has fallen")[1].endswith("and the versions are the same: something else has changed")
    assert ({"reversible": 4}, {"prompt": "kept-1-initial"}) == (result.steps, result.resources)
    assert 1.0 == look(tmp_path, saved_state)["state"]["rate"]


def say(task: int, prompt: PromptTemplate, rollout: Rollout) -> str:
    """Say the reward of :func:`solve`, for a judge to read."""
    return str(solve(task, prompt, rollout))


def judge(rollout: Rollout, spans: Sequence[Span]) -> float:
    """Believe what the agent says; the server that judges is away after the second and third step."""
    if rollout.mode == "val" and rollout.metadata["step"] in (2, 3) and "-final-" not in rollout.rollout_id:
        raise ConnectionError("the judge is away")
    return float(next(span.attributes[semconv.OUTPUT] for span in spans if semconv.OUTPUT in span.attributes))


def test_rewards_that_break_in_two_validations_are_no_collapse(fit: Callable[..., Any]) -> None:
    progress = Lines()
    result = fit("0.8", "0.8", "0.8", "0.9", agent=say, rewards=[judge], on_collapse="stop", progress=progress)

    assert 2 == len(progress.about("0.000 (20 of 20 failed)"))
    assert [] == progress.about("has fallen")
    assert 0.9 == result.after


@pytest.mark.parametrize("text", ["0.9", "0.6"])
def test_fall_that_chance_explains_changes_nothing(text: str, fit: Callable[..., Any]) -> None:
    progress = Lines()
    fit("0.9", text, text, text, use="reversible", progress=progress)

    assert [] == progress.about("fallen")


SCRIPT = """
import os
import signal
import sys
from pathlib import Path

import agl
from agl.algorithms import algorithm
from agl.schemas import PromptTemplate, Rollout
from agl_run import Quiet

TASKS = 20


class Deadly(Quiet):
    '''Dies of the first line that holds the next words; each only once.'''

    def say(self, text):
        print(text, flush=True)
        for number, words in enumerate(sys.argv[2:]):
            if words in text and not Path(f"died-{number}").exists():
                Path(f"died-{number}").touch()
                os.kill(os.getpid(), signal.SIGKILL)


def solve(task: int, prompt: PromptTemplate, rollout: Rollout) -> float:
    shares = prompt.template.split("/")
    share = shares[-1] if "-final-" in rollout.rollout_id else shares[0]
    return float(task < float(share) * TASKS)


texts = ["0.80/0.40", "0.75/0.70", "0.1", "0.1", "0.7/0.60", "0.65", "0.2"]
result = agl.Trainer(
    name="kept",
    algorithm=algorithm("reversible", tunes="prompt", texts=texts, dies_in=sys.argv[1]),
    initial_resources={"prompt": PromptTemplate(template="0.0")},
    store="sqlite:///runs.db",
    progress=Deadly(),
    validate_every=1,
).fit(solve, [0], list(range(TASKS)), resume=Path("runs.db").exists())
print("result", result.before, result.after, result.last, result.kept_step, result.best, result.resources, result.steps)
"""

DEATHS = [
    ("validation reward after step 1:", "validation reward after step 4:"),  # promoted, and before anything follows
    ("", "", "go_back"),
    ("back to the versions", "validation reward after step 7:"),
    ("fresh rollouts decide", "fresh rollouts of the versions after step 2"),
    ("fresh rollouts of the versions after step 1", "fresh rollouts of the versions after step 5"),
]


@pytest.mark.parametrize("words", DEATHS)
def test_run_that_is_killed_ends_as_one_that_is_not(
    words: tuple[str, ...], fit: Callable[..., Any], agl_plugins: PluginFolder, tmp_path: Path
) -> None:
    del fit  # only its plugin
    (tmp_path / "script.py").write_text(SCRIPT)
    dies_in = tmp_path / "died" if "go_back" in words else tmp_path
    spoken = [one for one in words if one not in ("", "go_back")]
    command = [sys.executable, "script.py", str(dies_in), *spoken]
    said = ""
    for _ in spoken or ("go_back",):
        killed = subprocess.run(command, cwd=tmp_path, env=agl_plugins.environment, capture_output=True, text=True)
        assert -signal.SIGKILL == killed.returncode
        said += killed.stdout
    done = subprocess.run(command, cwd=tmp_path, env=agl_plugins.environment, capture_output=True, text=True)

    assert 0 == done.returncode, done.stderr
    assert 1 == (said + done.stdout).count("back to the versions after step 1")
    assert "the versions are the same" not in said + done.stdout  # it remembers that it went back
    expected = "result 0.0 0.7 0.2 2 0.8 {'prompt': 'kept-1-reversible-2'} {'reversible': 7}"
    assert expected == done.stdout.splitlines()[-1]
    assert "kept-1-reversible-2" == look(tmp_path, best_version)
    assert {"step": 7, "rate": 0.5, "from": 1} == look(tmp_path, saved_state)["state"]
