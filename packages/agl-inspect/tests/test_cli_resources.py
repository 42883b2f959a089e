"""``agl resources`` on the command line, and the labels and intervals that it shows."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agl.contracts import ExperimentRecord, LabelMove, Store, VersionScore
from agl.errors import NotFoundError
from agl.schemas import JsonResource, Outcome, PromptTemplate, ResourceVersion, Reward, Rollout, Span
from agl.schemas._ids import new_span_id
from agl.stores import MemoryStore
from agl_inspect.records import labels
from agl_inspect.records.state import AlgorithmState, save_progress
from agl_inspect.terminal.program import cli
from agl_inspect.versions import Arm, compare_arms, diff_versions
from agl_store_sqlite._store import SQLiteStore

VERSIONS = [
    ResourceVersion(name="prompt", version="v1", resource=PromptTemplate(template="Be brief.\nAnswer {q}")),
    ResourceVersion(
        name="prompt",
        version="v2",
        parent="v1",
        algorithm="apo",
        step=3,
        resource=PromptTemplate(template="Be exact.\nAnswer {q}"),
    ),
    ResourceVersion(
        name="prompt",
        version="tried",
        parent="v1",
        resource=PromptTemplate(template="?"),
        metadata={"candidate": True},
    ),
    ResourceVersion(name="tools", version="t1", resource=JsonResource(value={"calc": "adds"})),
]


async def fill(
    store: Store, rewards: dict[str, Sequence[float | None]], validated: dict[str, Sequence[Any]] | None = None
) -> None:
    """Publish the versions, and record a rollout for each reward; for ``None`` a failed rollout.

    ``validated`` has the tasks of each version whose rollouts are validation rollouts.
    """
    await store.publish(VERSIONS)
    await store.save_scores([VersionScore(name="prompt", version="v2", mean=0.8, low=0.7, high=0.9, n=32, how="trial")])
    for version, values in rewards.items():
        rollouts = [
            Rollout(rollout_id=f"{version}-{i}", task=task, experiment="e", mode=mode, resources={"prompt": version})
            for mode, tasks in [
                ("val", validated[version]) if version in (validated or {}) else ("train", range(len(values)))
            ]
            for i, task in enumerate(tasks)
        ]
        await store.enqueue(rollouts)
        for claim in await store.claim(worker="w", limit=len(values)):
            value = values[int(claim.rollout.rollout_id.rpartition("-")[2])]
            attempt = claim.attempt
            span = Span(
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt_id,
                span_id=new_span_id(),
                name="reward",
                reward=Reward(value=value, source="evaluator"),
            )
            await store.append_spans([span] if value is not None else [])
            await store.finish(
                [Outcome(attempt_id=attempt.attempt_id, status="succeeded" if value is not None else "failed")]
            )


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that runs ``agl resources``; its first call fills the store with ``rewards`` by version."""
    path = tmp_path / "runs.db"

    def call(
        *arguments: str,
        rewards: dict[str, Sequence[float | None]] | None = None,
        validated: dict[str, Sequence[Any]] | None = None,
    ) -> Result:
        if not path.exists():

            async def make() -> None:
                store = SQLiteStore(f"sqlite:///{path}")
                await fill(store, rewards or {}, validated)
                await store.close()

            asyncio.run(make())
        return CliRunner().invoke(cli, ["resources", *arguments, "--store", f"sqlite:///{path}"])

    return call


def test_list_names_every_resource_and_all_versions_of_one(run: Callable[..., Result]) -> None:
    everything = run("list").output
    assert "t1" in everything
    one = run("list", "prompt").output
    assert ["prompt  v1", "prompt  v2"] == [line[:10] for line in one.splitlines()[1:]]
    assert "0.800 [0.700, 0.900] n=32" in one
    assert "tried" in run("list", "prompt", "--candidates").output
    parsed = json.loads(run("list", "prompt", "--json").output)
    assert ["v1", "v2"] == [item["version"]["version"] for item in parsed]


def test_show_gives_lineage_and_text_and_takes_a_label(run: Callable[..., Result]) -> None:
    run("promote", "prompt", "v1")
    assert "lineage: v2 <- v1" in run("show", "prompt").output
    shown = run("show", "prompt", "production").output
    assert "labels: production" in shown
    assert shown.endswith("Be brief.\nAnswer {q}\n")
    assert '"calc": "adds"' in run("show", "tools").output


def test_publish_makes_the_text_of_a_file_the_next_version_of_a_prompt(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "text.md").write_text("Be kind.\nAnswer {q}\n")
    (tmp_path / "wrong.md").write_text("Answer {question}")

    published = run("publish", "prompt", str(tmp_path / "text.md"))

    version = published.output.split()[-1]
    assert f"published prompt {version}\n" == published.output
    assert f"lineage: {version} <- v2 <- v1" in run("show", "prompt").output
    assert run("show", "prompt").output.endswith("Be kind.\nAnswer {q}\n")
    refused = run("publish", "prompt", str(tmp_path / "wrong.md")).stderr
    assert "placeholders ['question'], which agents do not fill" in refused, refused
    assert "'tools' is no prompt (JsonResource)" in run("publish", "tools", str(tmp_path / "text.md")).stderr
    assert 0 == run("publish", "new", str(tmp_path / "text.md")).exit_code


def test_diff_prints_what_changed_and_says_so_in_the_exit_status(run: Callable[..., Result]) -> None:
    changed = run("diff", "prompt", "v1", "v2")
    assert (1, True) == (changed.exit_code, "-Be brief.\n+Be exact.\n Answer {q}\n" in changed.output)
    same = run("diff", "prompt", "v2")
    assert (0, "no difference\n") == (same.exit_code, same.output)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (PromptTemplate(template="a"), PromptTemplate(template="a\n"), "they differ in line breaks alone"),
        (PromptTemplate(template="a\nb"), PromptTemplate(template="a\r\nb"), "they differ in line breaks alone"),
        (PromptTemplate(template="a"), PromptTemplate(template="a", engine="jinja"), "they differ in their kind"),
        (PromptTemplate(template="5"), JsonResource(value=5), "they differ in their kind"),
    ],
)
def test_diff_tells_of_what_no_line_shows(old: Any, new: Any, said: str) -> None:
    versions = [ResourceVersion(name="p", version=name, resource=each) for name, each in (("1", old), ("2", new))]
    *head, line = diff_versions(*versions)
    assert ["--- 1", "+++ 2"] == head
    assert line.startswith(said)
    assert [] == diff_versions(versions[0], versions[0])


def test_promoted_version_is_rolled_back_step_by_step(run: Callable[..., Result]) -> None:
    for version in ("v1", "v2", "tried"):
        assert f"production is now {version}" in run("promote", "prompt", version).output
    assert "production is now v2 (back from tried)" in run("rollback", "prompt").output
    assert "production is now v1 (back from v2)" in run("rollback", "prompt").output
    last = run("rollback", "prompt")
    assert (1, True) == (last.exit_code, "pointed at nothing before 'v1'" in last.output)


LOW, HIGH = [0.1, 0.2] * 6, [0.8, 0.9] * 6


@pytest.mark.parametrize(
    ("rewards", "options", "status", "message"),
    [
        ({"v1": LOW, "v2": HIGH}, (), 0, "better, evidence 46 to 1: difference +0.7000"),
        ({"v1": LOW, "v2": HIGH}, ("--min-gain", "0.7"), 1, "evidence 1 to 1, 33 to 1 needed"),
        ({"v1": LOW, "v2": HIGH}, ("--error", "0.001"), 1, "1,645 to 1 needed"),
        ({"v1": LOW, "v2": LOW[::-1]}, (), 1, "v2 is not shown to be better than v1: cannot be told apart"),
        ({"v1": HIGH, "v2": LOW}, (), 1, "v2 is not shown to be better than v1: worse"),
        ({"v1": LOW, "v2": [*HIGH[:6], None, None, None]}, (), 1, "9 and 9 rollouts"),
        ({"v1": LOW, "v2": []}, (), 1, "12 rewards of the old version and 0 of the new one"),
    ],
    ids=["better", "gain too small", "evidence too weak", "equal", "worse", "failures count", "nothing ran"],
)
def test_label_moves_only_at_strong_evidence(
    run: Callable[..., Result],
    rewards: dict[str, Sequence[float | None]],
    options: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    run("promote", "prompt", "v1", rewards=rewards)
    done = run("promote", "prompt", "v2", "--if-better", *options)
    assert (status, True) == (done.exit_code, message in done.output), done.output
    now = "v1" if status else "v2"
    assert f"labels: production\nlineage: {now}" in run("show", "prompt", now).output


def test_each_new_version_needs_stronger_evidence_and_another_look_costs_nothing(run: Callable[..., Result]) -> None:
    run("promote", "prompt", "v1", rewards={"v1": LOW, "v2": LOW[::-1], "tried": HIGH})

    looks = [
        run("promote", "prompt", version, "--if-better", *options).output
        for version, options in [("v2", ()), ("tried", ("--experiment", "e")), ("v2", ()), ("tried", ())]
    ]

    needed = ["33 to 1", "132 to 1", "33 to 1", "296 to 1"]
    assert [True] * 4 == [f"{odds} needed" in look for odds, look in zip(needed, looks, strict=True)], looks


def test_labelled_version_has_nothing_to_beat(run: Callable[..., Result]) -> None:
    run("promote", "prompt", "v1", rewards={"v1": LOW, "v2": LOW})

    again = run("promote", "prompt", "v1", "--if-better")

    assert (0, "prompt: production is now v1\n") == (again.exit_code, again.output)
    assert "33 to 1 needed" in run("promote", "prompt", "v2", "--if-better").output


def test_compare_reports_both_arms_and_the_ratio(run: Callable[..., Result]) -> None:
    done = run("compare", "prompt", "v1", "v2", rewards={"v1": [0.4, 0.6], "v2": [0.7, 0.8, 0.9]})
    assert "v1: mean 0.5000" in done.output
    assert "v2: mean 0.7500" in done.output  # the third reward has no partner
    assert "policy_improvement_ratio 1.500, 2 and 2 rollouts; about" in done.output
    assert done.output.endswith(
        " pairs would do\nnot paired by task: 0 validation tasks in both; left out: 0 and 1 rollout\n"
    )


BETTER = {"v1": [0.1, 0.3, 0.5, 0.7, 0.9], "v2": [0.16, 0.34, 0.55, 0.76, 0.94]}
"""A small gain on tasks of very different difficulty."""


def test_compare_weighs_named_rewards_as_the_experiments_last_step_did(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    async def add() -> None:
        store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")
        await store.enqueue(
            [
                Rollout(rollout_id=f"{version}-{n}", task=n, experiment="e", resources={"prompt": version})
                for version in ("v1", "v2")
                for n in range(2)
            ]
        )
        for claim in await store.claim(worker="w", limit=4):
            ids = {"rollout_id": claim.rollout.rollout_id, "attempt_id": claim.attempt.attempt_id}
            value = float(claim.rollout.resources["prompt"] == "v2")
            spans = tuple(
                Span(**ids, span_id=new_span_id(), name=name, reward=Reward(value=value, name=name, source="evaluator"))
                for name in ("syntax", "goal")
            )
            await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded", spans=spans)])
        weights = {"experiment.reward_weights.syntax": "0.25", "experiment.reward_weights.goal": "0.5"}
        await save_progress(store, ExperimentRecord(name="e"), {"grpo": AlgorithmState(step=1, settings=weights)})
        await store.close()

    run("list")
    asyncio.run(add())
    output = run("compare", "prompt", "v1", "v2").output
    assert "v1: mean 0.0000" in output
    assert "v2: mean 0.7500" in output


def test_compare_pairs_nine_validations_of_the_same_tasks(run: Callable[..., Result]) -> None:
    rewards = {version: [*values, *values] for version, values in BETTER.items()}
    tasks = {"v1": [*"abcdefghij"], "v2": [*"abcdefghij"]}
    lines = run("compare", "prompt", "v1", "v2", rewards=rewards, validated=tasks).output.splitlines()
    assert "policy_improvement_ratio 1.100, paired by 10 tasks, 10 and 10 rollouts; about" in lines[2]
    assert 3 == len(lines)


def test_compare_leaves_out_tasks_that_one_version_was_not_validated_on(run: Callable[..., Result]) -> None:
    tasks = {"v1": [*"aabcdefghi"], "v2": [*"abcdefghijj"]}
    rewards = {"v1": [0.1] * 10, "v2": [0.3] * 11}
    lines = run("compare", "prompt", "v1", "v2", rewards=rewards, validated=tasks).output.splitlines()
    assert "paired by 9 tasks, 10 and 9 rollouts; about" in lines[2]
    assert "left out: 0 and 2 rollouts" == lines[3]


@pytest.mark.parametrize(
    ("validated", "common"),
    [({"v2": [*"abcde"]}, "0 validation tasks"), ({"v1": [*"abcde"], "v2": [*"abxyz"]}, "2 validation tasks")],
)
def test_compare_with_few_common_tasks_counts_all_rollouts_and_says_so(
    run: Callable[..., Result], validated: dict[str, Sequence[Any]], common: str
) -> None:
    done = run("compare", "prompt", "v1", "v2", rewards=BETTER, validated=validated)
    assert "difference +0.0500" in done.output
    assert ", 5 and 5 rollouts; about" in done.output
    assert done.output.endswith(f"\nnot paired by task: {common} in both\n")


def arm_of(version: str, values: Sequence[float], *, start: float = 0.0, validated: Sequence[float] = ()) -> Arm:
    """Return an arm with a user for each value, and validations of the tasks 0, 1 and so on."""
    users = {f"{version}-{n}": [value] for n, value in enumerate(values)}
    tasks = {f"task-{n}": [value] for n, value in enumerate(validated)}
    ended = {unit: start + n for n, unit in enumerate([*users, *tasks])}
    return Arm(version=version, units={**users, **tasks}, ended=ended, validated=tasks)


def test_newest_rollouts_of_the_old_version_are_paired() -> None:
    old, new = arm_of("v1", [*[0.0] * 20, *[1.0] * 200]), arm_of("v2", [0.8] * 20, start=1000)

    found, counted, note = compare_arms(old, new)

    assert [[1.0] * 20, [0.8] * 20] == [arm.rewards for arm in counted]
    assert pytest.approx(-0.2) == found.difference
    assert note.endswith("left out: 200 and 0 rollouts")


def test_pairs_do_not_change_when_rollouts_are_added() -> None:
    old, more = arm_of("v1", [0.1, 0.2, 0.3]), arm_of("v1", [0.1, 0.2, 0.3, 0.9, 0.9, 0.9])
    new = arm_of("v2", [0.4], start=2.5)

    assert compare_arms(old, new)[0].evidence == compare_arms(more, new)[0].evidence


def test_few_common_validation_tasks_do_not_hide_what_users_say() -> None:
    old, new = (arm_of(name, [value] * 100, validated=[value] * 3) for name, value in (("v1", 0.0), ("v2", 1.0)))

    found, _, note = compare_arms(old, new)

    assert ("better", 103, "not paired by task: 3 validation tasks in both") == (found.verdict, found.pairs, note)


def test_task_that_ran_often_counts_once(run: Callable[..., Result]) -> None:
    same = {"v1": [{"n": 1}] * 30, "v2": [{"n": 1}] * 30}
    run("promote", "prompt", "v1", rewards={"v1": [0.0] * 30, "v2": [1.0] * 30}, validated=same)

    done = run("promote", "prompt", "v2", "--if-better")

    assert (1, True) == (done.exit_code, "cannot be told apart, evidence 1.3 to 1" in done.output), done.output


def test_rewards_outside_the_declared_range_are_refused(run: Callable[..., Result]) -> None:
    run("promote", "prompt", "v1", rewards={"v1": [0.0] * 40, "v2": [5.0] * 40})

    plain, wide = (run("promote", "prompt", "v2", "--if-better", *given) for given in ((), ("--range", "-5", "5")))

    assert (1, True) == (plain.exit_code, "the reward 5 is outside the range from 0 to 1" in plain.output)
    assert (0, True) == (wide.exit_code, "40 and 40 rollouts with rewards within a span of 10" in wide.output)


def test_comparison_that_cannot_be_made_spends_nothing(run: Callable[..., Result]) -> None:
    run("promote", "prompt", "v1", rewards={"v1": LOW, "v2": LOW})

    refused = [
        run("promote", "prompt", version, "--if-better", *options).output
        for version, options in [("tried", ()), ("v2", ("--experiment", "typo")), ("v2", ("--min-gain", "1.5"))]
    ]

    assert "--min-gain 1.5 is out of reach for rewards from 0 to 1" in refused[-1]
    assert "33 to 1 needed" in run("promote", "prompt", "v2", "--if-better").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "promt"), "unknown resource 'promt'; did you mean 'prompt'?"),
        (("show", "prompt", "v9"), "unknown version 'prompt@v9'"),
        (("promote", "prompt", "v1", "--label", "a/b"), "may hold letters"),
        (("rollback", "tools"), "unknown label 'tools/production'"),
        (("promote", "prompt", "v2", "--if-better"), "promote once without"),
        (("promote", "prompt", "v2", "--min-gain", "0.1"), "--min-gain would do nothing without --if-better"),
        (
            ("promote", "prompt", "v2", "--error", "0.1", "--experiment", "e"),
            "leave out --error and --experiment",
        ),
    ],
)
def test_wrong_names_are_told(run: Callable[..., Result], arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert (1, True) == (done.exit_code, message in done.output), done.output


def test_rollout_shows_the_versions_that_it_ran_with(run: Callable[..., Result], tmp_path: Path) -> None:
    run("list", rewards={"v2": [0.5]})
    shown = CliRunner().invoke(cli, ["show", "v2-0", "--store", f"sqlite:///{tmp_path}/runs.db"])
    assert "with prompt@v2\n" in shown.output


def test_moves_of_two_processes_leave_no_torn_label(tmp_path: Path) -> None:
    async def body() -> tuple[list[LabelMove], dict[str, str]]:
        stores = [SQLiteStore(f"sqlite:///{tmp_path}/runs.db") for _ in range(2)]
        await stores[0].publish(VERSIONS)
        moves = [labels.move(stores[i % 2], "prompt", "production", ("v1", "v2")[i % 2]) for i in range(12)]
        await asyncio.gather(*moves)
        kept = await stores[1].label_moves("prompt", "production")
        pointing = await labels.labels_of(stores[0], "prompt")
        for store in stores:
            await store.close()
        return kept, pointing

    kept, pointing = asyncio.run(body())
    assert {"production": kept[-1].version} == pointing
    assert sorted(made.moved_at for made in kept) == [made.moved_at for made in kept]


def test_label_needs_a_version_that_exists() -> None:
    async def body() -> None:
        store = MemoryStore()
        await store.publish(VERSIONS)
        await labels.move(store, "prompt", "production", "v9")

    with pytest.raises(NotFoundError):
        asyncio.run(body())


def command(run: Callable[..., Result], tmp_path: Path, *arguments: str) -> Result:
    """Run a command other than ``agl resources`` on the store of ``run``."""
    run("list")
    return CliRunner().invoke(cli, [*arguments, "--store", f"sqlite:///{tmp_path}/runs.db"])


def test_show_tells_how_a_resource_came_to_be(run: Callable[..., Result], tmp_path: Path) -> None:
    output = command(run, tmp_path, "show", "prompt").output
    assert output.startswith("prompt: 2 published versions, 1 candidate\n- v1 from -, given\n")
    assert "- v2 from v1, by apo step 3, score 0.800 [0.700, 0.900] n=32" in output
    assert "- tried (candidate) from v1, given\n" in output
    assert "-Be brief.\n+Be exact." in output
    unknown = command(run, tmp_path, "show", "nothing")
    assert (1, True) == (unknown.exit_code, "unknown rollout 'nothing'" in unknown.output)


def test_score_that_was_measured_later_is_shown_in_place_of_the_earlier_one(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    run("list")

    async def measure() -> None:
        store = SQLiteStore(f"sqlite:///{tmp_path}/runs.db")
        for mean in (0.9, 0.7):
            again = VersionScore(name="prompt", version="v2", mean=mean, low=0.5, high=0.9, n=8, how="fresh rollouts")
            await store.save_scores([again])
        await store.close()

    asyncio.run(measure())
    output = command(run, tmp_path, "show", "prompt").output
    assert "- v2 from v1, by apo step 3, score 0.700 [0.500, 0.900] n=8 (fresh rollouts)\n" in output
    assert "- tried (candidate) from v1, given\n" in output


def test_export_writes_a_prompt_as_text_json_and_python(run: Callable[..., Result], tmp_path: Path) -> None:
    assert command(run, tmp_path, "data", "export", "prompt", "--format", "text").stdout == "Be exact.\nAnswer {q}\n"
    parsed = json.loads(command(run, tmp_path, "data", "export", "prompt@v1", "--format", "json").stdout)
    assert ("v1", "Be brief.\nAnswer {q}") == (parsed["version"], parsed["resource"]["template"])
    namespace: dict[str, Any] = {}
    exec(command(run, tmp_path, "data", "export", "prompt@v2", "tools", "--format", "python").stdout, namespace)
    assert "Be exact.\nAnswer {q}" == namespace["PROMPT"]
    assert {"calc": "adds"} == namespace["TOOLS"]["value"]
    nameless = command(run, tmp_path, "data", "export", "--format", "text")
    assert (1, True) == (nameless.exit_code, "name one, such as" in nameless.output)
