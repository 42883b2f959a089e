"""The engine over small random models, compared with recomputed log-probabilities."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agl.errors import ConfigError
from agl_algo_torch.serving.engine import Engine, EngineSettings, pick
from agl_algo_torch.serving.sampling import Draw, SamplingParams
from agl_algo_torch.serving.sequence import (
    EngineError,
    EngineStoppedError,
    Event,
    Flight,
    Generation,
    GenerationRequest,
    PromptError,
    QueueFullError,
)

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
KINDS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=4)),
    "llama-gqa": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=512)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=24)),
}


def make_model(kind: str = "qwen2", *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = KINDS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # a freshly initialised model is nearly uniform, whatever it attends to
    return model


class Running:
    """A started engine, and helpers that submit requests and wait for the answers."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model = model
        self.engine = Engine(model, settings=EngineSettings(**settings))
        self.engine.start()

    def submit(self, *requests: GenerationRequest) -> list["Answer"]:
        answers = [Answer() for _ in requests]
        flights = self.engine.submit(requests, listeners=[answer.hear for answer in answers])
        for answer, flight in zip(answers, flights, strict=True):
            answer.flight = flight
        return answers

    def ask(self, *requests: GenerationRequest) -> list[Generation]:
        return [answer.wait() for answer in self.submit(*requests)]


class Answer:
    def __init__(self) -> None:
        self.tokens: list[Draw] = []
        self.first = threading.Event()
        self.done: Future[Generation] = Future()
        self.flight: Flight

    def hear(self, event: Event) -> None:
        if isinstance(event, Draw):
            self.tokens.append(event)
            self.first.set()
        elif isinstance(event, EngineError):
            self.done.set_exception(event)
        else:
            self.done.set_result(event)

    def wait(self) -> Generation:
        return self.done.result(timeout=60)


@pytest.fixture
def running() -> Any:
    started: list[Running] = []

    def start(model: Any = None, **settings: Any) -> Running:
        started.append(Running(model if model is not None else make_model(), **settings))
        return started[-1]

    yield start
    for one in started:
        one.engine.stop()


def prompt(length: int, *, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 61, (length,), generator=generator).tolist())


def ask(length: int = 8, *, seed: int = 0, max_tokens: int = 8, **fields: Any) -> GenerationRequest:
    params = SamplingParams(**fields.pop("params", {}))
    return GenerationRequest(prompt_ids=prompt(length, seed=seed), max_tokens=max_tokens, params=params, **fields)


@torch.no_grad()
def recompute(model: Any, prompt_ids: Sequence[int], ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
    logits = model(torch.tensor([[*prompt_ids, *ids]])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)
    return [logprobs[len(prompt_ids) - 1 + i, token].item() for i, token in enumerate(ids)]


def logprobs(generation: Generation) -> list[float]:
    return [draw.logprob for draw in generation.draws]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_a_changing_batch_equal_a_recompute(kind: str, running: Any) -> None:
    run = running(make_model(kind), max_rows=6, prefill_tokens=128)
    requests = [ask(5 + 7 * (i % 9), seed=i % 11, max_tokens=3 + i % 13) for i in range(40)]
    answers: list[Answer] = []
    for start in range(0, 40, 8):
        answers += run.submit(*requests[start : start + 8])
        time.sleep(0.01)
    for request, answer in zip(requests, answers, strict=True):
        generation = answer.wait()
        assert request.max_tokens == len(generation.draws)
        expected = recompute(run.model, request.prompt_ids, generation.token_ids)
        assert expected == pytest.approx(logprobs(generation), abs=1e-5)


def test_a_greedy_answer_is_the_same_alone_and_in_a_batch(running: Any) -> None:
    run = running(prefix_bytes=0)
    greedy = {"temperature": 0.0}
    alone = run.ask(ask(20, seed=3, max_tokens=12, params=greedy))[0]
    batch = run.ask(
        *[ask(4 + 9 * i, seed=i, max_tokens=12, params=greedy) for i in range(3)],
        ask(20, seed=3, max_tokens=12, params=greedy),
    )
    assert alone.token_ids == batch[-1].token_ids
    assert logprobs(alone) == pytest.approx(logprobs(batch[-1]), abs=1e-5)


def test_logprobs_are_those_of_the_scaled_distribution(running: Any) -> None:
    run = running()
    request = ask(12, max_tokens=20, params={"temperature": 0.6})
    generation = run.ask(request)[0]
    expected = recompute(run.model, request.prompt_ids, generation.token_ids, temperature=0.6)
    assert expected == pytest.approx(logprobs(generation), abs=1e-5)


def test_a_late_short_request_finishes_before_an_early_long_one(running: Any) -> None:
    run = running()
    (long,) = run.submit(ask(10, max_tokens=400, wants_tokens=True))
    assert long.first.wait(timeout=30)
    (short,) = run.submit(ask(10, seed=1, max_tokens=3))
    short.wait()
    assert not long.done.done()
    assert 400 == len(long.wait().draws)


def test_a_turn_reuses_the_keys_of_the_one_before(running: Any) -> None:
    run = running()
    first = ask(40, max_tokens=10)
    answer = run.ask(first)[0]
    longer = GenerationRequest(prompt_ids=(*first.prompt_ids, *answer.token_ids, 5, 6, 7), max_tokens=10)
    second = run.ask(longer)[0]
    assert 40 + 10 - 1 == second.cached_tokens
    assert recompute(run.model, longer.prompt_ids, second.token_ids) == pytest.approx(logprobs(second), abs=1e-5)


def test_siblings_and_a_common_prefix_are_computed_once(running: Any) -> None:
    run = running()
    common = prompt(100, seed=9)
    requests = [GenerationRequest(prompt_ids=(*common, i // 8), max_tokens=2) for i in range(32)]
    run.ask(*requests)
    assert run.engine.stats.prefilled_tokens < 101 + 8 * 8


def test_a_seed_repeats_in_any_company_and_leaves_the_global_state_alone(running: Any) -> None:
    run = running()
    seeded = ask(15, max_tokens=15, params={"seed": 7})
    torch.manual_seed(123)
    before = torch.get_rng_state()
    alone = run.ask(seeded)[0]
    crowd = run.ask(*[ask(9, seed=i, max_tokens=20) for i in range(10)], seeded)[-1]
    assert alone.token_ids == crowd.token_ids
    assert torch.equal(before, torch.get_rng_state())


def test_one_allowed_token_is_the_most_likely_one(running: Any) -> None:
    run = running()
    greedy, top_k, top_p = run.ask(
        ask(params={"temperature": 0.0}), ask(params={"top_k": 1}), ask(params={"top_p": 1e-6})
    )
    assert greedy.token_ids == top_k.token_ids == top_p.token_ids
    assert logprobs(greedy) == pytest.approx(logprobs(top_k), abs=1e-5)


def test_alternatives_come_most_likely_first(running: Any) -> None:
    run = running()
    generation = run.ask(ask(params={"temperature": 0.0, "top_logprobs": 3}))[0]
    for draw in generation.draws:
        assert (draw.token_id, draw.logprob) == draw.top[0]
        assert 3 == len(draw.top)
        assert sorted((value for _, value in draw.top), reverse=True) == [value for _, value in draw.top]


def test_samples_follow_the_model(running: Any) -> None:
    run = running(max_rows=64)
    request = ask(6, max_tokens=1)
    drawn = torch.tensor([g.token_ids[0] for g in run.ask(*[request] * 1024)])
    with torch.no_grad():
        expected = run.model(torch.tensor([request.prompt_ids])).logits[0, -1].softmax(-1)
    share = torch.bincount(drawn, minlength=61) / 1024
    assert float((share - expected).abs().sum()) < 0.25


def test_a_stop_token_is_returned_and_ends_the_answer(running: Any) -> None:
    run = running()
    free = run.ask(ask(params={"seed": 1}))[0]
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    stopped = run.ask(ask(params={"seed": 1}, stop_ids=frozenset({stop})))[0]
    assert free.token_ids[: first + 1] == stopped.token_ids
    assert "stop" == stopped.finish_reason


def test_cancelling_frees_the_row(running: Any) -> None:
    run = running(max_rows=1)
    (long,) = run.submit(ask(max_tokens=400, wants_tokens=True))
    assert long.first.wait(timeout=30)
    (waiting,) = run.submit(ask(seed=1, max_tokens=2))
    run.engine.cancel([long.flight])
    assert 2 == len(waiting.wait().draws)
    assert not long.done.done()
    assert len(long.tokens) < 400


def test_a_cancelled_request_that_waits_is_never_run(running: Any) -> None:
    run = running(max_rows=1)
    (long,) = run.submit(ask(max_tokens=200, wants_tokens=True))
    assert long.first.wait(timeout=30)
    (gone,) = run.submit(ask(seed=1, wants_tokens=True))
    run.engine.cancel([gone.flight])
    long.wait()
    run.ask(ask(seed=2))
    assert [] == gone.tokens


def test_too_many_waiting_requests_are_refused_together(running: Any) -> None:
    run = running(max_rows=1, max_waiting=3)
    (long,) = run.submit(ask(max_tokens=300, wants_tokens=True))
    assert long.first.wait(timeout=30)
    run.submit(ask(seed=1), ask(seed=2))
    with pytest.raises(QueueFullError, match="at most 3"):
        run.submit(ask(seed=3), ask(seed=4))
    run.submit(ask(seed=5))


def test_one_attempt_has_an_idle_server_for_itself(running: Any) -> None:
    run = running(max_rows=2, max_waiting=4)
    alone = run.submit(*[ask(seed=n, max_tokens=300, wants_tokens=True, attempt="a") for n in range(4)])
    for answer in alone[:2]:
        assert answer.first.wait(timeout=30)
    assert {"running": 2, "waiting": 2} == {key: run.engine.snapshot()[key] for key in ("running", "waiting")}


def test_queue_of_an_attempt_at_its_share_is_not_searched_at_every_token(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []

    def counted(waiting: Any, **how: Any) -> Any:
        searches.append(len(waiting))
        return pick(waiting, **how)

    monkeypatch.setattr("agl_algo_torch.serving.engine.pick", counted)
    run = running(max_rows=4)
    (other,) = run.submit(ask(max_tokens=200, wants_tokens=True, attempt="other"))
    assert other.first.wait(timeout=30)
    many = run.submit(*[ask(seed=n, max_tokens=200, attempt="a") for n in range(5)])
    for answer in (other, *many):
        answer.wait()
    assert len(searches) < 12


def apply_weights(source: Any) -> Callable[[Any], None]:
    return lambda model: model.load_state_dict(source.state_dict())


def test_a_swap_waits_for_running_requests_and_forgets_prefixes(running: Any) -> None:
    old, new = make_model(seed=0), make_model(seed=1)
    served = make_model(seed=0)
    run = running(served)
    early = ask(30, max_tokens=150, wants_tokens=True)
    (running_one,) = run.submit(early)
    assert running_one.first.wait(timeout=30)
    done = run.engine.swap(apply_weights(new), version="1")
    (queued,) = run.submit(early)
    done.result(timeout=30)
    first, second = running_one.wait(), queued.wait()
    assert [("0", 0, 150)] == [(s.version, s.start, s.end) for s in first.versions]
    assert [("1", 0, 150)] == [(s.version, s.start, s.end) for s in second.versions]
    assert recompute(old, early.prompt_ids, first.token_ids) == pytest.approx(logprobs(first), abs=1e-5)
    assert recompute(new, early.prompt_ids, second.token_ids) == pytest.approx(logprobs(second), abs=1e-5)
    assert 0 == second.cached_tokens


def test_a_request_that_spans_two_versions_says_which_drew_what(running: Any) -> None:
    old, new = make_model(seed=0), make_model(seed=1)
    run = running(make_model(seed=0))
    request = ask(30, max_tokens=300, wants_tokens=True)
    (answer,) = run.submit(request)
    assert answer.first.wait(timeout=30)
    run.engine.swap(apply_weights(new), version="1", drain_s=0.0).result(timeout=30)
    generation = answer.wait()
    assert ["0", "1"] == [span.version for span in generation.versions]
    assert [0, generation.versions[1].start] == [generation.versions[0].start, generation.versions[0].end]
    cut = generation.versions[0].end
    before = recompute(old, request.prompt_ids, generation.token_ids)[:cut]
    after = recompute(new, request.prompt_ids, generation.token_ids)[cut:]
    assert before + after == pytest.approx(logprobs(generation), abs=1e-5)


def test_a_swap_that_fails_tells_its_caller_and_changes_nothing(running: Any) -> None:
    run = running()
    before = run.ask(ask(params={"temperature": 0.0}))[0]

    def fail(_model: Any) -> None:
        raise RuntimeError("no such weights")

    with pytest.raises(RuntimeError, match="no such weights"):
        run.engine.swap(fail, version="1").result(timeout=30)
    after = run.ask(ask(params={"temperature": 0.0}))[0]
    assert "0" == run.engine.version
    assert before.token_ids == after.token_ids


def test_a_swap_can_be_withdrawn_while_it_waits(running: Any) -> None:
    run = running()
    (long,) = run.submit(ask(max_tokens=200, wants_tokens=True))
    assert long.first.wait(timeout=30)
    done = run.engine.swap(apply_weights(make_model(seed=1)), version="1")
    assert done.cancel()
    long.wait()
    run.ask(ask(seed=1))
    assert ("0", 0) == (run.engine.version, run.engine.stats.swaps)


def test_weights_that_diverged_fail_the_request_and_not_the_engine(
    running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = running()
    good = make_model()

    def spoil(model: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    run.engine.swap(spoil, version="bad").result(timeout=30)
    with pytest.raises(EngineError, match="not finite"):
        run.ask(ask())
    assert "a generation step failed" in caplog.text
    run.engine.swap(apply_weights(good), version="good").result(timeout=30)
    request = ask(20)
    generation = run.ask(request)[0]
    assert recompute(good, request.prompt_ids, generation.token_ids) == pytest.approx(logprobs(generation), abs=1e-5)


@pytest.mark.parametrize("name", ["_forward", "_draw"])
def test_prefill_that_fails_is_told_to_its_requests_and_not_to_those_that_wait(
    name: str, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = running(max_rows=2)
    real, failing = getattr(run.engine, name), [RuntimeError("out of memory")]

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if failing:
            raise failing.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(run.engine, name, fail_once)
    first, sibling, waiting = run.submit(ask(), ask(), ask(20, seed=1))
    for answer in (first, sibling):
        with pytest.raises(EngineError, match="out of memory"):
            answer.wait()
    generation = waiting.wait()
    expected = recompute(run.model, prompt(20, seed=1), generation.token_ids)
    assert expected == pytest.approx(logprobs(generation), abs=1e-5)


@pytest.mark.parametrize("ids", [(), (1, 61), (-1, 1), (2**40,)])
def test_prompt_that_the_model_cannot_read_is_refused_before_it_runs(ids: tuple[int, ...], running: Any) -> None:
    run = running()
    message = "no tokens" if not ids else f"token id {max(ids, key=abs)}, but the model has ids from 0 to 60"
    with pytest.raises(PromptError, match=message):
        run.submit(ask(), GenerationRequest(prompt_ids=ids, max_tokens=2))
    with pytest.raises(PromptError, match=message):
        run.engine.score(ids)
    assert {"running": 0, "waiting": 0} == {key: run.engine.snapshot()[key] for key in ("running", "waiting")}


def test_prompts_are_scored_beside_running_requests(running: Any) -> None:
    run = running()
    (answer,) = run.submit(ask(max_tokens=100, wants_tokens=True))
    assert answer.first.wait(timeout=30)
    ids = prompt(12, seed=3)
    found = run.engine.score(ids).result(timeout=30)
    assert recompute(run.model, ids[:1], ids[1:]) == pytest.approx(found, abs=1e-4)
    generation = answer.wait()
    assert recompute(run.model, prompt(8, seed=0), generation.token_ids) == pytest.approx(
        logprobs(generation), abs=1e-4
    )


def test_prompt_that_cannot_be_scored_tells_its_caller_and_changes_nothing(running: Any) -> None:
    run = running(make_model("gpt2"))
    with pytest.raises(EngineError, match="Scoring failed: IndexError"):  # GPT-2 has 512 positions here
        run.engine.score([1] * 600).result(timeout=30)
    assert run.ask(ask())


def test_stopping_answers_everybody(running: Any) -> None:
    run = running(max_rows=1)
    answers = run.submit(ask(max_tokens=400, wants_tokens=True), ask(seed=1))
    assert answers[0].first.wait(timeout=30)
    run.engine.stop()
    run.engine.stop()
    with pytest.raises(EngineStoppedError):
        run.engine.score([1, 2])
    for answer in answers:
        with pytest.raises(EngineStoppedError):
            answer.wait()
    with pytest.raises(EngineStoppedError):
        run.submit(ask())


def test_a_model_without_keys_and_values_is_refused() -> None:
    model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=61, state_size=4))
    with pytest.raises(ConfigError, match=r"mamba.*vLLM"):
        Engine(model)
