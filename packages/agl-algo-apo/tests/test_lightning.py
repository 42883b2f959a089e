"""Prompt tuning as in Agent Lightning's room selection example: only the import line differs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict, cast

import pytest
from openai import AsyncOpenAI, OpenAI

from agl_lightning import APO, Dataset, PromptTemplate, TraceToMessages, Trainer, prompt_rollout, setup_logging
from agl_run import Quiet
from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer

DESKS = {"north": 4, "south": 2, "attic": 8}
RULE = "Take the smallest that is large enough."


class Wish(TypedDict):
    """A number of people, and the desk that suits them."""

    id: str
    wish: dict[str, int]
    expected: str


def wishes() -> Dataset[Wish]:
    suits = {1: "south", 2: "south", 3: "north", 4: "north", 6: "attic", 8: "attic"}
    return [
        {"id": f"w{day}-{people}", "wish": {"people": people}, "expected": desk}
        for day in range(8)
        for people, desk in suits.items()
    ]


def first_prompt() -> PromptTemplate:
    return PromptTemplate(template="Find a desk for {people} people.", engine="f-string")


def grade(client: OpenAI, said: str | None, expected: str) -> float:
    """Let another model compare an answer with the expected one; returns a number from 0 to 1."""
    question = f"Answer: {said}\nExpected: {expected}\nHow well do they match?"
    answer = client.chat.completions.create(model="judge", messages=[{"role": "user", "content": question}])
    return float(answer.choices[0].message.content or 0)


@prompt_rollout
def desk_finder(task: Wish, prompt_template: PromptTemplate) -> float:
    """Ask the model with the prompt; a judge gives the reward."""
    with OpenAI() as client:
        messages: list[Any] = [
            {"role": "system", "content": "You know all desks."},
            {"role": "user", "content": prompt_template.format(**task["wish"])},
        ]
        answer = client.chat.completions.create(model="small", messages=messages, temperature=0.0)
        return grade(client, answer.choices[0].message.content, task["expected"])


def respond(request: ModelRequest) -> Reply:
    """Play all models: find a desk, correctly only if the prompt has the rule; judge; criticise and edit a prompt."""
    model, text = str(request.body["model"]), request.last_text
    if model == "judge":
        said, expected = re.findall(r": (\w+)", text)[:2]
        return Reply(text="1.0" if said == expected else "0.0")
    if model == "small":
        people = int(re.findall(r"\d+", text)[0])
        large = {name: size for name, size in DESKS.items() if size >= people}
        return Reply(text=min(large, key=DESKS.__getitem__) if RULE in text else "attic")
    if model == "critic":
        return Reply(text=f"It chooses too large desks. It should say: {RULE}")
    return Reply(text=f"<new_text>\n{first_prompt().template} {RULE}\n</new_text>")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedModelServer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-nobody")
    with ScriptedModelServer(respond=respond, models=("small", "judge", "critic", "editor")) as running:
        monkeypatch.setenv("OPENAI_BASE_URL", running.base_url)
        yield running


@pytest.mark.long
def test_script_that_tunes_the_prompt_of_a_desk_finder_runs_twice(server: ScriptedModelServer) -> None:
    setup_logging(console=False)
    algorithm = APO[Wish](
        AsyncOpenAI(),
        gradient_model="critic",
        apply_edit_model="editor",
        val_batch_size=4,
        gradient_batch_size=4,
        beam_width=2,
        branch_factor=2,
        beam_rounds=2,
        _poml_trace=True,
    )
    trainer = Trainer(
        algorithm=algorithm,
        n_runners=8,
        initial_resources={"prompt_template": first_prompt()},
        adapter=TraceToMessages(),
        progress=Quiet(),
    )
    data = cast("list[Wish]", wishes())

    first = trainer.fit(agent=desk_finder, train_dataset=data[::2], val_dataset=data[1::2])

    assert RULE in algorithm.get_best_prompt().template
    assert (pytest.approx(1 / 3), 1.0) == (first.before, first.after)
    assert {"small", "judge", "critic", "editor"} == {
        json.loads(call.body)["model"] for call in server.calls if call.body
    }

    again = trainer.fit(agent=desk_finder, train_dataset=data[::2], val_dataset=data[1::2])

    assert (first.before, first.after) == (again.before, again.after)
