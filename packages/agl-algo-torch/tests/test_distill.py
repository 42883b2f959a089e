"""Distillation from a teacher in a folder and from one behind a server, in a world of two calls per rollout."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from aiohttp import web

from agl.errors import AglError, ConfigError
from agl.schemas import LLM, Weights, unpack_floats, unpack_ids
from agl_algo_torch.data.teachers import LocalTeacher, ServedTeacher
from agl_algo_torch.distill import Distill
from agl_algo_torch.learner.batch import recompute_logprobs
from agl_algo_torch.learner.model import LoadedModel, load_model
from agl_algo_torch.learner.packing import packed_inputs
from agl_algo_torch.serving.policy import TorchPolicy
from agl_objectives.settings import Compute
from agl_testing.conformance import AlgorithmConformance, AlgorithmScenario, FinishedCredit
from agl_testing.conformance.bench import AlgorithmBench

from .token_world import World, made, published, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path

    from agl.contracts import Policy, StepReport

# peft 0.21 reads an attribute that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def teacher_dir(make_loaded: Callable[..., LoadedModel], tmp_path: Path) -> Path:
    """Directory of another model with the same tokenizer."""
    return saved(make_loaded(seed=9), tmp_path / "teacher")


def saved(loaded: Any, path: Path) -> Path:
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight.mul_(8.0)
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


def scenario_of(
    model_dir: Path, teacher: Any, *, policies: Callable[[Path], Mapping[str, Policy]] | None = None, **params: Any
) -> AlgorithmScenario:
    settings = {"steps": 3, "tasks_per_step": 4, "group_size": 2, "lr": 3e-3, "threads": 1, "device": "cpu", **params}
    return AlgorithmScenario(
        make=lambda: made(Distill, teacher=str(teacher), **settings),
        play=World().play,
        tunes=("llm",),
        resources={"llm": Weights(uri=str(model_dir))},
        max_steps=40,
        **({"policies": policies} if policies else {}),
    )


def reports_of(tmp_path: Path, model_dir: Path, teacher: Any, **params: Any) -> list[StepReport]:
    return asyncio.run(run(AlgorithmBench(scenario_of(model_dir, teacher, **params), tmp_path)))


class TestConformance(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path, teacher_dir: Path) -> AlgorithmScenario:
        return replace(
            scenario_of(model_dir, teacher_dir), make_longer=scenario_of(model_dir, teacher_dir, steps=5).make
        )


@pytest.mark.long
class TestConformanceWithEverything(AlgorithmConformance):
    """Rewards in addition to the teacher, several updates and adapters must resume as exactly as the defaults."""

    @pytest.fixture
    def scenario(self, model_dir: Path, teacher_dir: Path) -> AlgorithmScenario:
        return scenario_of(
            model_dir, teacher_dir, reward_coef=0.5, updates_per_step=2, epochs=2, lora_rank=4, warmup=1, decay="linear"
        )


@pytest.mark.long
class TestConformanceWithChosenTasks(AlgorithmConformance):
    """Rounds and a curriculum must resume as exactly as the defaults."""

    @pytest.fixture
    def scenario(self, model_dir: Path, teacher_dir: Path) -> AlgorithmScenario:
        chosen = {"tasks_per_step": 2, "refill": 2, "curriculum": "frontier", "reward_coef": 0.5}
        scenario = scenario_of(model_dir, teacher_dir, **chosen)
        return replace(scenario, train=[{"n": number} for number in range(12)])


@pytest.mark.long
class TestConformanceWithAServedTeacher(AlgorithmConformance):
    @pytest.fixture
    def scenario(self, model_dir: Path, teacher_dir: Path) -> AlgorithmScenario:
        return scenario_of(
            model_dir, "big", policies=lambda _: {"big": TorchPolicy(name="big", model=str(teacher_dir))}
        )


@pytest.mark.long
def test_policy_comes_closer_to_its_teacher(model_dir: Path, teacher_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, teacher_dir, steps=30, lr=1e-2, group_size=8), tmp_path / "work")
    reports = asyncio.run(run(bench))
    apart = [report.metrics["reverse_kl"] for report in reports]
    assert sum(apart[-3:]) < 0.5 * sum(apart[:3]), apart
    assert {1.0} == {report.metrics["teacher_share"] for report in reports}
    published(bench)


def test_gap_is_the_teachers_logprob_less_the_samplers(model_dir: Path, teacher_dir: Path, tmp_path: Path) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, teacher_dir, steps=1), tmp_path / "work")
    (report,) = asyncio.run(run(bench))
    model = load_model(str(teacher_dir), device="cpu").model
    gaps: list[float] = []
    for episode in bench.collected.values():
        (row,) = episode.rows
        ids, mask = unpack_ids(row.ids), row.mask
        logp = model(input_ids=torch.tensor([ids])).logits[0].detach().log_softmax(-1)
        gaps += [own - float(logp[i - 1, ids[i]]) for i, own in enumerate(unpack_floats(row.logprobs)) if mask[i]]
    assert report.metrics["reverse_kl"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    assert len(bench.collected) == len(report.trained)


def test_teacher_behind_a_server_says_what_it_says_in_a_folder(
    model_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    policies = lambda _: {"big": TorchPolicy(name="big", model=str(teacher_dir))}  # noqa: E731
    (here,) = reports_of(tmp_path / "here", model_dir, teacher_dir, steps=1)
    (there,) = reports_of(tmp_path / "there", model_dir, "big", steps=1, policies=policies)
    for name in ("reverse_kl", "loss", "grad_norm"):
        assert here.metrics[name] == pytest.approx(there.metrics[name], rel=1e-4)


def test_rewards_are_part_of_the_advantages_where_they_are_asked_for(
    model_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    params = {"steps": 1, "group_size": 8}
    (alone,) = reports_of(tmp_path / "alone", model_dir, teacher_dir, **params)
    (mixed,) = reports_of(tmp_path / "mixed", model_dir, teacher_dir, reward_coef=3.0, **params)
    assert alone.metrics["reverse_kl"] == pytest.approx(mixed.metrics["reverse_kl"])
    assert alone.metrics["grad_norm"] != pytest.approx(mixed.metrics["grad_norm"], rel=1e-2)


def refusal(bench: AlgorithmBench) -> str:
    async def body() -> None:
        async with bench:
            algorithm = bench.scenario.make()
            try:
                await algorithm.setup(bench.context())
            finally:
                await algorithm.close()

    with pytest.raises(ConfigError) as caught:
        asyncio.run(body())
    assert not bench.requests
    return str(caught.value)


def test_teacher_with_another_tokenizer_is_refused_before_the_first_rollout(
    make_loaded: Callable[..., LoadedModel], model_dir: Path, tmp_path: Path
) -> None:
    other = saved(make_loaded(merges=(("a", "b"), ("i", "n"))), tmp_path / "other")
    message = refusal(AlgorithmBench(scenario_of(model_dir, other), tmp_path / "work"))
    assert "has another tokenizer than the policy" in message
    policies = lambda _: {"big": TorchPolicy(name="big", model=str(other))}  # noqa: E731
    served = refusal(AlgorithmBench(scenario_of(model_dir, "big", policies=policies), tmp_path / "served"))
    assert "'big' has another tokenizer than the policy: it splits a text" in served


def test_teacher_that_is_the_policy_or_a_folder_without_a_slash_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "work" / "big").mkdir(parents=True)
    for teacher, message in (("llm", "which is the policy that it tunes"), ("big", "teacher = './big'")):
        assert message in refusal(AlgorithmBench(scenario_of(model_dir, teacher), tmp_path / "work"))


@asynccontextmanager
async def server(answer: Callable[[dict[str, Any]], web.Response]) -> AsyncIterator[LLM]:
    """Start a server of completions with the given answers."""

    async def handle(request: web.Request) -> web.Response:
        return answer(await request.json())

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield LLM(endpoint=f"http://{host}:{port}/v1", model="big")
    finally:
        await runner.cleanup()


def scored(body: dict[str, Any], *, drop: int = 0) -> web.Response:
    ids = body["prompt"]
    entries = [None, *({str(i): {"logprob": -0.5}} for i in ids[1:])]
    return web.json_response({"choices": [{"prompt_logprobs": entries[drop:]}]})


def ask(
    answer: Callable[[dict[str, Any]], web.Response], *, wait_s: float = 5.0
) -> tuple[list[torch.Tensor], list[str]]:
    said: list[str] = []

    async def body() -> list[torch.Tensor]:
        async with server(answer) as llm:
            teacher = ServedTeacher(lambda: llm, name="big", wait_s=wait_s, say=said.append)
            try:
                return await teacher.score([sample_of([1, 2, 3])])
            finally:
                await teacher.close()

    return asyncio.run(body()), said


def sample_of(ids: list[int]) -> Any:
    from agl_algo_torch.learner.batch import from_tokens

    return from_tokens("r", ids, [0, *[1] * (len(ids) - 1)])


def test_teacher_that_is_away_is_reported_once_and_asked_again() -> None:
    answers = iter([web.Response(status=503), web.Response(status=503), None])

    def answer(body: dict[str, Any]) -> web.Response:
        return next(answers) or scored(body)

    (scores,), said = ask(answer)
    assert [0.0, -0.5, -0.5] == scores.tolist()
    (line,) = said
    assert "the teacher 'big' is away (it answered 503); asking again for 5 s" == line


def test_teacher_that_stays_away_ends_the_run_with_what_to_do() -> None:
    with pytest.raises(AglError, match=r"No rollout was trained without it\. Start it, then .* agl run --resume\."):
        ask(lambda _: web.Response(status=503), wait_s=0.2)


def test_teacher_is_asked_for_hours_at_even_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = ServedTeacher(lambda: LLM(), name="big", wait_s=1e9, say=lambda _: None)
    answers: list[Any] = ["it is away"] * 1200 + [{"prompt_logprobs": [None, {"2": {"logprob": -0.5}}]}]
    pauses: list[float] = []

    async def answer(_: Any) -> Any:
        return answers.pop(0)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(teacher, "_try", answer)
    monkeypatch.setattr("agl_algo_torch.data.teachers.asyncio.sleep", sleep)
    (scores,) = asyncio.run(teacher.score([sample_of([1, 2])]))
    assert [0.0, -0.5] == scores.tolist()
    assert [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0] == pytest.approx(pauses[:8])
    assert {5.0} == set(pauses[6:])


def test_teacher_in_a_folder_computes_packed_rows_and_the_logits_of_trained_tokens_alone(
    teacher_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [sample_of(list(range(1, length))) for length in (9, 40, 5)]
    model = load_model(str(teacher_dir), device="cpu").model
    expected = recompute_logprobs(model, samples, token_budget=64, device=torch.device("cpu"))
    passes: list[int] = []

    def packed(ids_N: torch.Tensor, lengths: Sequence[int]) -> dict[str, Any]:
        passes.append(len(ids_N))
        return packed_inputs(ids_N, lengths)

    monkeypatch.setattr("agl_algo_torch.learner.batch.packed_inputs", packed)
    monkeypatch.delattr("agl_algo_torch.learner.batch.whole_logits")
    teacher = LocalTeacher(str(teacher_dir), Compute(device="cpu", token_budget=64), say=pytest.fail)
    found = asyncio.run(teacher.score(samples))
    assert [8 + 39 + 4] == passes
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_what_a_teacher_in_a_folder_does_not_allow_is_said_once(
    teacher_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_algo_torch.data.teachers.pack", lambda _: "its rows cannot be packed")
    said: list[str] = []
    teacher = LocalTeacher(str(teacher_dir), Compute(device="cpu", token_budget=64), say=said.append)
    for _ in range(2):
        asyncio.run(teacher.score([sample_of([1, 2, 3])]))
    assert [f"the teacher {str(teacher_dir)!r}: its rows cannot be packed"] == said


def test_row_that_the_teacher_agrees_with_leaves_the_others_their_old_logprobs(model_dir: Path) -> None:
    algorithm = made(Distill, teacher="./big", updates_per_step=2, threads=1, device="cpu")
    learner = algorithm._tuned.tried_out(Weights(uri=str(model_dir)))
    silent = replace(sample_of([4, 5, 6]), advantages=torch.zeros(3))
    rows = algorithm._objective.prepared([sample_of([1, 2, 3]), silent], learner=learner, skips_silent=False)
    assert all(row.old is not None for row in rows)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: web.Response(status=404, text="no model big"), "refused a request with 404: no model big"),
        (lambda body: scored(body, drop=1), "asked for 3 tokens and answered 2"),
        (lambda _: web.json_response({"choices": [{}]}), "asked for 3 tokens and answered none"),
        (lambda _: web.json_response({"choices": [{"prompt_logprobs": [None, {}, {}]}]}), "without the token 2"),
    ],
)
def test_answers_that_cannot_be_used_are_named(answer: Any, message: str) -> None:
    with pytest.raises(AglError, match=message):
        ask(answer)


def test_server_that_scores_no_prompts_is_refused(make_tokenizer: Any) -> None:
    async def body() -> None:
        async with server(lambda _: web.json_response({"choices": [{"text": "a"}]})) as llm:
            teacher = ServedTeacher(lambda: llm, name="big", wait_s=1.0, say=lambda _: None)
            try:
                await teacher.start(make_tokenizer())
            finally:
                await teacher.close()

    with pytest.raises(ConfigError, match="answers without return_token_ids, which distillation needs"):
        asyncio.run(body())


def test_token_that_a_server_rules_out_has_a_finite_gap() -> None:
    text = '{"choices": [{"prompt_logprobs": [null, {"2": {"logprob": -Infinity}}, {"3": {"logprob": -0.5}}]}]}'
    (scores,), _ = ask(lambda _: web.Response(text=text, content_type="application/json"))
    assert [0.0, -100.0, -0.5] == scores.tolist()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"teacher": ""}, 'teacher is ""; correct it: Expected `str` of length >= 1'),
        ({"teacher": "./big", "reward_coef": 1.0, "group_size": 1}, "group_size is 1"),
        ({"teacher": "./big", "reward_coef": -1.0}, "reward_coef"),
        ({"teacher": "./big", "estimator": "remax"}, "distill got estimator = 'remax'"),
        ({"teacher": "./big", "estimator": "rloo"}, "estimator = 'rloo' without reward_coef, so nothing uses it"),
        ({"teacher": "./big", "loss": "kl-cov"}, 'loss = "kl-cov", whose penalty has no gradient in the first update'),
        ({"teacher": "./big", "refill": 2}, "refill = 2 without reward_coef: every group learns from the teacher"),
        ({"teacher": "./big", "loss": "ppo-clib"}, "No loss is named 'ppo-clib'"),
    ],
)
def test_settings_that_cannot_work_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(Distill, **params)


def test_credit_of_finished_advantages_is_said_to_leave_the_estimator_nothing(
    model_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    bench = AlgorithmBench(scenario_of(model_dir, teacher_dir, reward_coef=0.5), tmp_path, credit=FinishedCredit())
    (line,) = [line for line in asyncio.run(bench.said(steps=2)) if "estimator" in line]
    assert 'finished advantages, which estimator = "grpo" does not change' in line
