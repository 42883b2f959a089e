"""The optimiser's client with a real server: retries, memory, costs, and endpoints that refuse some fields."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agl_algo_apo.proposals.optimizer import (
    Optimizer,
    OptimizerDownError,
    OptimizerSettings,
    most_tokens,
    requested_pause,
)
from agl_algo_apo.search.budget import Budget, BudgetExhaustedError, BudgetLimits, Prices, Spent
from agl_testing.model_server import Cut, Garbage, ModelRequest, Reply, ScriptedModelServer, Status, Step

Respond = Callable[[ModelRequest], Step]


def ask(
    respond: Respond,
    folder: Path,
    *questions: tuple[str, str],
    limits: BudgetLimits | None = None,
    say: list[str] | None = None,
    **settings: Any,
) -> tuple[list[str | None], Budget, int]:
    """Ask all questions at once; returns the answers, the budget, and the number of requests that the server saw."""
    budget = Budget(limits or BudgetLimits())

    async def work(base_url: str) -> list[str | None]:
        given = OptimizerSettings(
            base_url=base_url, model="m", **{"max_tokens": 50, "retry_s": 0.01, "wait_s": 2, **settings}
        )
        said = print if say is None else say.append
        optimizer = Optimizer(given, budget=budget, memory=folder / "answers.jsonl", say=said)
        try:
            return [answer and answer.text for answer in await optimizer.ask_all(questions)]
        finally:
            await optimizer.close()

    with ScriptedModelServer(respond=respond, models=("m",)) as server:
        return asyncio.run(work(server.base_url)), budget, len(server.calls)


def test_answer_is_remembered_over_restarts_and_counted_each_time(tmp_path: Path) -> None:
    first, spent, calls = ask(lambda _: Reply(text="one"), tmp_path, ("q", "s"))
    assert (["one"], 1) == (first, calls)
    again, spent_again, calls = ask(lambda _: Reply(text="two"), tmp_path, ("q", "s"))
    assert (["one"], 0) == (again, calls)
    assert spent.spent == spent_again.spent
    other, _, calls = ask(lambda _: Reply(text="two"), tmp_path, ("q", "another seed"))
    assert (["two"], 1) == (other, calls)


def test_line_that_a_crash_cut_is_asked_again(tmp_path: Path) -> None:
    ask(lambda _: Reply(text="one"), tmp_path, ("q", "s"))
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert ["two"] == ask(lambda _: Reply(text="two"), tmp_path, ("q", "s"))[0]
    assert (["two"], 0) == ask(lambda _: Reply(text="three"), tmp_path, ("q", "s"))[::2]


def test_tokens_are_those_that_the_endpoint_counts(tmp_path: Path) -> None:
    _, budget, _ = ask(lambda _: Reply(text="one two"), tmp_path, ("a question of some length", "s"))
    assert 0 < budget.spent.tokens < len("a question of some length") + 64 + 50


def test_failures_that_pass_are_retried(tmp_path: Path) -> None:
    steps: list[Step] = [Status(code=503), Status(code=429), Garbage(), Reply(text="fine")]
    answers, budget, calls = ask(lambda request: steps[request.index], tmp_path, ("q", "s"))
    assert (["fine"], 4, 1) == (answers, calls, budget.spent.calls)


def test_outage_is_waited_for_and_told_once(tmp_path: Path) -> None:
    said: list[str] = []

    def respond(request: ModelRequest) -> Step:
        return Status(code=503) if request.index < 12 else Reply(text="fine")

    questions = [(f"question {number}", "s") for number in range(3)]
    answers, budget, _ = ask(respond, tmp_path, *questions, say=said)
    assert (["fine"] * 3, 3) == (answers, budget.spent.calls)
    assert 1 == len(said)
    assert re.fullmatch(
        r"the optimiser's model at http://\S+ does not answer \(HTTP 503: .*\); "
        "the search waits for it, for 2 s at most",
        said[0],
    )


def test_endpoint_that_asks_for_a_pause_gets_it(tmp_path: Path) -> None:
    seen: list[float] = []

    def respond(request: ModelRequest) -> Step:
        seen.append(time.monotonic())
        return Status(code=429, retry_after=0.4) if request.index == 0 else Reply(text="fine")

    assert ["fine"] == ask(respond, tmp_path, ("q", "s"))[0]
    assert seen[1] - seen[0] >= 0.4


def test_pause_beyond_the_limit_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(OptimizerDownError, match="HTTP 429"):
        ask(lambda _: Status(code=429, retry_after=3600), tmp_path, ("q", "s"))


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("7", 7, 7),
        ("0.5", 0.5, 0.5),
        ("Thu, 01 Jan 2099 00:00:00 GMT", 1e8, 1e10),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
    ],
)
def test_pause_is_read_in_seconds_and_as_a_date(value: str, low: float, high: float) -> None:
    pause = requested_pause({"retry-after": value})
    assert pause is not None
    assert low <= pause <= high


@pytest.mark.parametrize("headers", [{}, {"retry-after": "soon"}])
def test_pause_that_is_not_named_is_none(headers: dict[str, str]) -> None:
    assert requested_pause(headers) is None


@pytest.mark.parametrize(
    ("step", "requests"),
    [(Status(code=429, message="insufficient_quota"), 1), (Status(code=401), 1), (Garbage(), 4)],
)
def test_endpoint_that_does_not_answer_is_down(tmp_path: Path, step: Step, requests: int) -> None:
    seen: list[int] = []

    def respond(request: ModelRequest) -> Step:
        seen.append(request.index)
        return step

    with pytest.raises(OptimizerDownError, match="did not answer"):
        ask(respond, tmp_path, ("q", "s"))
    assert requests == len(seen)


def failed(base_url: str, folder: Path, **settings: Any) -> Spent:
    """Return what the budget has spent after a question that got no answer."""
    budget = Budget(BudgetLimits(prices=Prices(input=1.0, output=1.0)))

    async def work() -> None:
        given = OptimizerSettings(base_url=base_url, model="m", max_tokens=50, retry_s=0.01, wait_s=0.1, **settings)
        optimizer = Optimizer(given, budget=budget, memory=folder / "answers.jsonl", say=print)
        try:
            with pytest.raises(OptimizerDownError):
                await optimizer.ask("q", seed="s")
        finally:
            await optimizer.close()

    asyncio.run(work())
    return budget.spent


def test_question_that_no_server_takes_costs_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        assert Spent() == failed(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", tmp_path)


@pytest.mark.parametrize("code", [400, 401, 429])
def test_refused_question_costs_nothing(tmp_path: Path, code: int) -> None:
    with ScriptedModelServer(respond=lambda _: Status(code=code), models=("m",)) as server:
        assert Spent() == failed(server.base_url, tmp_path)


@pytest.mark.parametrize(
    "step", [Reply(text="late", delay=1.0), Garbage(), Cut(reply=Reply(text="half")), Status(code=504)]
)
def test_question_whose_answer_may_have_been_made_stays_paid(tmp_path: Path, step: Step) -> None:
    with ScriptedModelServer(respond=lambda _: step, models=("m",)) as server:
        spent = failed(server.base_url, tmp_path, timeout_s=0.2)
    assert (1, most_tokens("q") + 50) == (spent.calls, spent.tokens)


def test_question_that_is_refused_after_a_time_out_stays_paid(tmp_path: Path) -> None:
    steps: list[Step] = [Status(code=504), Status(code=400)]
    with ScriptedModelServer(respond=lambda request: steps[request.index], models=("m",)) as server:
        assert 1 == failed(server.base_url, tmp_path).calls


def test_one_failed_question_of_several_is_none(tmp_path: Path) -> None:
    def respond(request: ModelRequest) -> Step:
        return Status(code=400) if "bad" in request.last_text else Reply(text=f"re: {request.last_text}")

    assert ["re: a", None, "re: b"] == ask(respond, tmp_path, ("a", "s"), ("bad", "s"), ("b", "s"))[0]


def test_questions_beyond_the_budget_are_not_asked(tmp_path: Path) -> None:
    limits = BudgetLimits(calls=2)
    answers, _, calls = ask(lambda _: Reply(text="x"), tmp_path, ("a", "1"), ("b", "2"), ("c", "3"), limits=limits)
    assert (["x", "x", None], 2) == (answers, calls)
    with pytest.raises(BudgetExhaustedError):
        ask(lambda _: Reply(text="x"), tmp_path, ("a", "1"), limits=BudgetLimits(calls=0))


def test_fields_that_an_endpoint_refuses_are_left_out(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []

    def respond(request: ModelRequest) -> Step:
        bodies.append(dict(request.body))
        for name, say in (("temperature", "temperature"), ("seed", "seed"), ("max_tokens", "max_completion_tokens")):
            if name in request.body:
                return Status(code=400, message=f"unsupported: {name}; use {say}")
        return Reply(text="fine")

    assert ["fine"] == ask(respond, tmp_path, ("q", "s"))[0]
    assert 50 == bodies[-1]["max_completion_tokens"]
    assert not {"temperature", "seed", "max_tokens"} & bodies[-1].keys()


def test_questions_asked_at_once_all_leave_out_what_the_first_refusal_names(tmp_path: Path) -> None:
    refused: list[str] = []

    def respond(request: ModelRequest) -> Step:
        if "max_tokens" not in request.body:
            return Reply(text=f"re: {request.last_text}")
        if not refused:
            time.sleep(0.5)  # the server answers nobody until the others have been sent as well
        refused.append(request.last_text)
        return Status(code=400, message="unsupported: max_tokens; use max_completion_tokens")

    questions = [(name, "s") for name in "abcd"]
    assert ["re: a", "re: b", "re: c", "re: d"] == ask(respond, tmp_path, *questions)[0]
    assert len(refused) > 1


def test_key_and_extra_fields_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-123")
    seen: list[tuple[str, Any]] = []

    def respond(request: ModelRequest) -> Step:
        seen.append((request.headers["authorization"], request.body.get("top_p")))
        return Reply(text="x")

    ask(respond, tmp_path, ("q", "s"), api_key_env="MY_KEY", extra={"top_p": 0.5})
    assert [("Bearer sk-123", 0.5)] == seen
    assert "sk-123" not in json.dumps((tmp_path / "answers.jsonl").read_text())


def answer_of(folder: Path, choice: dict[str, Any], *, question: str = "q", **settings: Any) -> tuple[str, list[str]]:
    """Return the model's answer if the endpoint sends this choice, and the messages to the user."""
    said: list[str] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps({"choices": [choice]}).encode()  # halves of characters as escapes
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    async def work(base_url: str) -> str:
        given = OptimizerSettings(base_url=base_url, model="m", **settings)
        optimizer = Optimizer(given, budget=Budget(BudgetLimits()), memory=folder / "answers.jsonl", say=said.append)
        try:
            return (await optimizer.ask(question, seed="s")).text
        finally:
            await optimizer.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            return asyncio.run(work(f"http://127.0.0.1:{server.server_port}/v1")), said
        finally:
            server.shutdown()
            thread.join()


def test_half_a_character_is_left_out_of_answers_and_questions(tmp_path: Path) -> None:
    choice = {"message": {"content": "smile \ud83d, \ud83d\ude00 and \ude00"}}
    assert "smile , \U0001f600 and " == answer_of(tmp_path, choice, question="what is \ud83d?")[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}], "Be brief."),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Be brief."}], "Be brief."),
        (["Be ", "brief."], "Be brief."),
        (None, ""),
    ],
)
def test_answer_in_parts_is_read(tmp_path: Path, content: Any, text: str) -> None:
    assert (text, []) == answer_of(tmp_path, {"message": {"content": content}})


def test_answer_that_is_cut_off_is_reported_with_what_to_do(tmp_path: Path) -> None:
    choice = {"message": {"content": "<new_text>Be"}, "finish_reason": "length"}
    text, said = answer_of(tmp_path, choice, max_tokens=50)
    assert "<new_text>Be" == text
    assert [
        "answers of the optimiser's model end at 50 tokens (finish_reason length), before they are complete; "
        "raise max_tokens in optimizer = { ..., max_tokens = 200 }"
    ] == said
