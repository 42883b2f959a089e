"""SDPO as an algorithm, in a world of conversations with feedback about bad answers."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from agl import semconv
from agl.errors import ConfigError
from agl.schemas import Attempt, Reward, Span, Weights, unpack_ids
from agl_algo_torch.data.feedback import Lesson
from agl_algo_torch.data.lessons import Retelling, SelfTeacher, Teaching
from agl_algo_torch.learner.model import load_model
from agl_algo_torch.sdpo import NOTHING_TO_LEARN, SDPO, scaled_logprobs
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario, FinishedCredit
from agl_testing.conformance.bench import AlgorithmBench

from .chat_world import ChatWorld
from .token_world import made, run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agl.contracts import StepReport
    from agl.schemas import Episode

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def saved_model(saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model with a flatter distribution of answers, so that rewards differ."""
    folder = shutil.copytree(saved_model, tmp_path_factory.mktemp("flat") / "model")
    loaded = load_model(str(folder), device="cpu")
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight.div_(3.0)  # type: ignore[operator]
    loaded.model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def scenario_of(model_dir: Path, world: ChatWorld | None = None, **params: Any) -> AlgorithmScenario:
    settings = {"steps": 3, "tasks_per_step": 2, "group_size": 4, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
    return AlgorithmScenario(
        make=lambda: made(SDPO, **settings),
        play=(world or ChatWorld()).play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
    )


def reports_of(tmp_path: Path, model_dir: Path, world: ChatWorld | None = None, **params: Any) -> list[StepReport]:
    return asyncio.run(run(AlgorithmBench(scenario_of(model_dir, world, **params), tmp_path)))


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return replace(scenario_of(model_dir), make_longer=scenario_of(model_dir, steps=5).make)


@pytest.mark.long
class TestConformanceWithEverything(AlgorithmConformance):
    """The policy at the start, GRPO's loss and adapters must resume as exactly as the defaults."""

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        return scenario_of(model_dir, teacher_start=0.3, grpo_coef=0.5, lora_rank=4, warmup=1, decay="linear")


@pytest.mark.long
class TestConformanceWithChosenTasks(AlgorithmConformance):
    """Rounds and a curriculum must resume as exactly as the defaults."""

    @pytest.fixture
    def scenario(self, model_dir: Path) -> AlgorithmScenario:
        chosen = {"group_size": 2, "refill": 2, "curriculum": "frontier", "sources": ("siblings",)}
        return replace(scenario_of(model_dir, **chosen), train=questions(12))


def questions(count: int) -> list[dict[str, str]]:
    return [{"question": f"question {number}"} for number in range(count)]


def first_update(
    tmp_path: Path, model_dir: Path, world: ChatWorld | None = None, **params: Any
) -> tuple[AlgorithmBench, dict[str, torch.Tensor]]:
    """Return the bench with the rollouts of the first step, and the gradient of that step."""
    bench = AlgorithmBench(scenario_of(model_dir, world or ChatWorld(temperature=0.7), steps=1, **params), tmp_path)
    found: dict[str, torch.Tensor] = {}

    async def body() -> None:
        async with bench:
            algorithm: Any = bench.scenario.make()
            await algorithm.setup(bench.context())
            learner = await algorithm._tuned.learner()

            def keep(report: dict[str, float]) -> dict[str, float]:
                named = learner.loaded.model.named_parameters()
                found.update({name: p.grad.clone() for name, p in named if p.grad is not None})
                return report

            learner.apply = keep
            await algorithm.step()

    asyncio.run(body())
    return bench, found


@pytest.mark.parametrize("token_budget", [100, 16_384])
def test_gradient_is_that_of_the_divergence_from_the_told_policy(
    tmp_path: Path, model_dir: Path, token_budget: int
) -> None:
    """The expected gradient comes from single calls without micro-batches; the template renders the lesson."""
    params = {"sources": ("rewards",), "top_k": 0, "divergence": "reverse", "closing_words": ""}
    bench, found = first_update(
        tmp_path, model_dir, group_size=8, feedback_words="Bad: {feedback}", token_budget=token_budget, **params
    )
    loaded = load_model(str(model_dir), device="cpu")
    model, encode = loaded.model, loaded.tokenizer
    begin = encode("<|im_start|>assistant\n")["input_ids"]
    lesson = encode("<|im_start|>user\nBad: the first token was low<|im_end|>\n")["input_ids"]
    total, tokens = torch.zeros(()), 0
    for episode in bench.collected.values():
        for call in episode.transitions if not episode.reward else ():
            prompt, answer = unpack_ids(call.prompt_ids), unpack_ids(call.response_ids)
            told = prompt[: -len(begin)] + lesson + begin
            logp, teacher = (_logprobs(model, ids, answer) for ids in (prompt, told))
            total = total + (logp.exp() * (logp - teacher.detach())).sum()
            tokens += len(answer)
    (total / tokens).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert tokens > 8
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


def _logprobs(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return scaled_logprobs(logits, temperature_M=torch.full((len(answer),), 0.7))


@pytest.mark.long
def test_policy_comes_closer_to_what_it_would_say_knowing_the_outcome(tmp_path: Path, model_dir: Path) -> None:
    reports = reports_of(tmp_path, model_dir, steps=12, lr=3e-3, group_size=8)
    apart = [report.metrics["divergence"] for report in reports]
    assert sum(apart[-3:]) < 0.5 * sum(apart[:3]), apart


def test_teacher_at_the_start_is_another_one_once_the_policy_has_moved(tmp_path: Path, model_dir: Path) -> None:
    params = {"lr": 1e-2, "steps": 2}
    free, held = (reports_of(tmp_path / f"{s}", model_dir, teacher_start=s, **params) for s in (0.0, 1.0))
    assert free[0].metrics["divergence"] == pytest.approx(held[0].metrics["divergence"], rel=1e-3)
    assert free[1].metrics["divergence"] != pytest.approx(held[1].metrics["divergence"], rel=1e-2)


def test_groups_about_which_nothing_can_be_told_are_replaced(tmp_path: Path, model_dir: Path) -> None:
    chosen = {"steps": 1, "group_size": 2, "refill": 20, "sources": ("siblings",)}
    bench = AlgorithmBench(replace(scenario_of(model_dir, **chosen), train=questions(40)), tmp_path)
    (report,) = asyncio.run(run(bench))
    by_group: dict[str, list[float]] = {}
    for episode in bench.collected.values():
        by_group.setdefault(episode.rollout.group_id, []).append(episode.reward or 0.0)
    mixed = {group for group, rewards in by_group.items() if 0 < sum(rewards) < 2}
    dropped = {name for name, uses in report.uses.items() if {NOTHING_TO_LEARN} == {use.note for use in uses}}
    assert {e.rollout.rollout_id for e in bench.collected.values() if e.rollout.group_id not in mixed} == dropped
    assert (2, 0.0) == (len(mixed), report.metrics["groups_missing"])
    assert report.metrics["groups_dropped"] == len(by_group) - 2 > 0
    assert report.trained


def test_a_group_that_failed_as_a_whole_is_kept_where_its_failures_were_told(tmp_path: Path, model_dir: Path) -> None:
    world = ChatWorld()
    world.value_of = lambda response: 0.0  # type: ignore[method-assign]
    chosen = {"steps": 1, "group_size": 2, "refill": 5}
    (report,) = reports_of(tmp_path, model_dir, world, **chosen)
    assert (0.0, 0.0) == (report.metrics["groups_silent"], report.metrics["rollouts_extra"])
    assert 8.0 == report.metrics["calls_taught"]


@pytest.mark.parametrize(("grpo_coef", "is_kept"), [(0.0, False), (0.5, True)])
def test_with_rewards_in_the_loss_a_group_that_differs_is_kept(
    tmp_path: Path, model_dir: Path, grpo_coef: float, is_kept: bool
) -> None:
    world = ChatWorld(remarks=False)
    chosen = {"steps": 1, "group_size": 8, "refill": 1, "sources": ("rewards",), "grpo_coef": grpo_coef}
    (report,) = reports_of(tmp_path, model_dir, world, **chosen)
    assert is_kept == (report.metrics["groups_silent"] < report.metrics["groups"])


def test_rollouts_with_nothing_to_tell_do_not_train_and_are_counted(tmp_path: Path, model_dir: Path) -> None:
    world = ChatWorld(remarks=False)
    (report,) = reports_of(tmp_path, model_dir, world, steps=1, sources=("rewards",))
    assert (0.0, 16.0, 1.0) == tuple(
        report.metrics[name] for name in ("calls_taught", "calls_untaught_nothing", "updates_skipped")
    )
    assert () == report.trained == report.published
    notes = {use.note for uses in report.uses.values() for use in uses}
    assert {"nothing was said about its rollout, and no sibling succeeded"} == notes


def test_failed_rollouts_learn_from_siblings_and_lone_successes_do_not(tmp_path: Path, model_dir: Path) -> None:
    bench = AlgorithmBench(
        scenario_of(model_dir, ChatWorld(remarks=False), steps=1, sources=("siblings",), group_size=8), tmp_path
    )
    (report,) = asyncio.run(run(bench))
    groups: dict[str, list[float]] = {}
    for episode in bench.collected.values():
        groups.setdefault(episode.rollout.group_id, []).append(episode.reward or 0.0)
    told = sum(len(rewards) if sum(rewards) > 1 else 7 for rewards in groups.values() if sum(rewards))
    assert 0 < told == report.metrics["rollouts_with_sibling"] == len(report.trained)


@pytest.mark.parametrize(("is_solved", "successes"), [(True, "agreed"), (True, "all"), (False, "agreed")])
def test_success_is_taught_only_where_its_teacher_agrees(
    tmp_path: Path, model_dir: Path, is_solved: bool, successes: str
) -> None:
    """A rollout that succeeded with feedback is taught at every token."""

    class Successful(ChatWorld):
        def play(self, order: Any) -> Any:
            return msgspec.structs.replace(super().play(order), reward=1.0)

    params = {"sources": ("siblings", "rewards"), "top_k": 0, "divergence": "reverse", "teach_successes": successes}
    world = Successful(temperature=0.7, remarks=not is_solved)
    if not is_solved:
        world.value_of = lambda response: 0.0  # type: ignore[method-assign]
    bench, found = first_update(tmp_path, model_dir, world, group_size=2, **params)
    loaded = load_model(str(model_dir), device="cpu")
    retelling = Retelling(loaded.tokenizer, max_tokens=1024)
    words = SelfTeacher()
    total, tokens, unheard = torch.zeros(()), 0, 0
    groups: dict[str, list[Episode]] = {}
    for episode in bench.collected.values():
        groups.setdefault(episode.rollout.group_id, []).append(episode)
    said = "" if is_solved else "the first token was low"
    for group in groups.values():
        for episode, sibling in zip(group, reversed(group), strict=True):
            shown = "\n".join(retelling.text(unpack_ids(call.response_ids)) for call in sibling.transitions)
            message = words.message(Lesson(feedback=said, sibling=shown))
            for call in episode.transitions:
                prompt, answer = unpack_ids(call.prompt_ids), unpack_ids(call.response_ids)
                told = retelling.prompt(prompt, message)
                assert told is not None
                logp, teacher = (_logprobs(loaded.model, ids, answer) for ids in (prompt, told))
                chosen = torch.tensor(answer)[:, None]
                gap = (teacher.gather(1, chosen) - logp.gather(1, chosen)).detach()[:, 0]
                heard = (gap >= 0) | (not is_solved) | (successes == "all")
                total = total + ((logp.exp() * (logp - teacher.detach())).sum(dim=1) * heard).sum()
                tokens, unheard = tokens + len(answer), unheard + int((~heard).sum())
    (total / tokens).backward()
    assert (0 < unheard < tokens) is (is_solved and successes == "agreed")
    for name, parameter in loaded.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=name)


def test_groups_without_a_success_teach_by_words_alone(tmp_path: Path, model_dir: Path) -> None:
    """GRPO has no gradient in such groups."""

    class Failed(ChatWorld):
        def play(self, order: Any) -> Any:
            return msgspec.structs.replace(super().play(order), reward=0.0)

    (report,) = reports_of(tmp_path, model_dir, Failed(), steps=1)
    assert (report.metrics["groups"], 0.0) == (report.metrics["groups_silent"], report.metrics["rollouts_with_sibling"])
    assert report.metrics["calls_taught"] > 0
    assert report.published


def test_mixing_adds_the_gradient_of_grpo(tmp_path: Path, model_dir: Path) -> None:
    (alone,) = reports_of(tmp_path / "alone", model_dir, steps=1)
    (mixed,) = reports_of(tmp_path / "mixed", model_dir, steps=1, grpo_coef=1.0)
    assert alone.metrics["divergence"] == pytest.approx(mixed.metrics["divergence"])
    assert alone.metrics["grad_norm"] != pytest.approx(mixed.metrics["grad_norm"], rel=1e-3)
    assert "grpo_loss" in mixed.metrics
    assert "grpo_loss" not in alone.metrics
    assert {row for uses in mixed.uses.values() for row in (use.row for use in uses)} == {0}


def teachers_texts(bench: AlgorithmBench, patch: pytest.MonkeyPatch, store: Any = None) -> list[str]:
    """Return the text that the teacher of each call reads in addition to the recorded prompt, in the first step."""
    found: list[str] = []
    told = Teaching._teacher_sample

    def listen(self: Any, call: Any, lesson: Any) -> Any:
        sample = told(self, call, lesson)
        if not isinstance(sample, str):
            shared = unpack_ids(call.prompt_ids) + unpack_ids(call.response_ids)
            found.append(self._retelling.text(sample.ids[: len(sample.ids) - len(shared) + 60].tolist()))
        return sample

    async def body() -> None:
        async with bench:
            algorithm: Any = bench.scenario.make()
            context = bench.context()
            await algorithm.setup(replace(context, store=store) if store else context)
            await algorithm.step()
            await algorithm.close()

    patch.setattr(Teaching, "_teacher_sample", listen)
    asyncio.run(body())
    return found


class Quoting(ChatWorld):
    """A world in which the reward's feedback quotes the hidden field in several spellings."""

    def play(self, order: Any) -> Any:
        rollout = msgspec.structs.replace(order.rollout, hidden=("answer",))
        played = super().play(replace(order, rollout=rollout))
        secret = rollout.task["answer"]
        remark = f"bad: expected {secret!r}, {secret.upper()} or {msgspec.json.encode(secret).decode()}"
        return msgspec.structs.replace(played, rewards=(Reward(value=0.0, source="evaluator", feedback=remark),))


def test_hidden_field_that_a_reward_quotes_is_not_in_the_teachers_tokens(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ["blue whale", 'a "b" c', "twenty\ntwo\nlines", "1234567", "über-Größe"]
    tasks = [{"question": f"q{i}", "answer": secret} for i, secret in enumerate(secrets)]
    scenario = replace(scenario_of(model_dir, Quoting(), steps=1, tasks_per_step=5, group_size=2), train=tasks)
    texts = teachers_texts(AlgorithmBench(scenario, tmp_path), monkeypatch)
    assert len(texts) == 20
    for text in texts:
        assert "bad: expected" in text
        assert not [secret for secret in secrets for line in secret.splitlines() if line.casefold() in text.casefold()]


class OneFailedTool:
    """A store in which each rollout has one failed tool, on a separate page of spans."""

    async def spans(self, rollout_id: str, *, after: int = 0, **_: Any) -> list[Span]:
        if after >= 2:
            return []
        attributes = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: "sql"}
        fields = {"status": "error", "status_message": "no such table", "attributes": attributes} if after else {}
        return [
            Span(rollout_id=rollout_id, attempt_id="a", span_id=f"s{after}", name="x", sequence=after + 1, **fields)
        ]


class Attempted(ChatWorld):
    def play(self, order: Any) -> Any:
        name = order.rollout.rollout_id
        attempt = Attempt(attempt_id=f"{name}.1", rollout_id=name, number=1, worker="w")
        return msgspec.structs.replace(super().play(order), attempt=attempt)


def test_tool_that_failed_is_told_from_the_store(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Attempted(remarks=False)
    scenario = scenario_of(model_dir, world, steps=1, tasks_per_step=1, group_size=2, sources=("tools",))
    texts = teachers_texts(AlgorithmBench(scenario, tmp_path), monkeypatch, store=OneFailedTool())
    assert len(texts) == 4
    assert all("sql: no such table" in text for text in texts)


def test_prompts_beyond_the_context_are_left_out(tmp_path: Path, model_dir: Path) -> None:
    words = {"feedback_words": "{feedback}" + "." * 2000}
    (report,) = reports_of(tmp_path, model_dir, steps=1, sources=("rewards",), **words)
    assert 0 == report.metrics["calls_taught"]
    assert 0 < report.metrics["calls_untaught_too_long"]


SETTINGS: list[tuple[Mapping[str, Any], str]] = [
    ({"sources": []}, r"teacher\.sources is \[\]; write an array of tools or rewards or siblings"),
    ({"sources": ["tool"]}, r"teacher\.sources is \[\"tool\"\]; write an array of tools or rewards"),
    ({"sources": ["siblings"], "group_size": 1}, "group_size is 1"),
    ({"grpo_coef": 1.0, "group_size": 1}, "group_size is 1"),
    ({"teach_successes": "agree"}, "teacher.teach_successes is \"agree\"; write one of .*'agreed'"),
    ({"divergence": "js"}, 'divergence is "js"; write one of .*jsd'),
    ({"teacher_start": 1.5}, "teacher.start is 1.5; write a number .*at most 1"),
    ({"aggregation": "constant"}, 'aggregation is "constant"; write one of token, sequence'),
    ({"estimator": "rloo"}, "sdpo got estimator = 'rloo' without grpo_coef, so nothing uses it"),
    ({"estimator": "remax"}, "sdpo got estimator = 'remax', which compares with greedy rollouts"),
    ({"sibling_words": "Right."}, r"sibling_words = 'Right.'.*\{sibling\}"),
]


@pytest.mark.parametrize(("params", "message"), SETTINGS)
def test_settings_that_cannot_work_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(SDPO, **params)


def test_credit_of_finished_advantages_is_said_to_leave_the_estimator_nothing(model_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, grpo_coef=0.5), tmp_path, credit=FinishedCredit())
    (line,) = [line for line in asyncio.run(bench.said(steps=2)) if "estimator" in line]
    assert 'finished advantages, which estimator = "grpo" does not change' in line
