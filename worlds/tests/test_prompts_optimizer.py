"""The scripted critic and editor know their request and nothing else."""

import httpx
import pytest

from worlds.prompts import easy, obeyed_styles
from worlds.prompts_optimizer import Mode, ScriptedOptimizer, edit, find_prompts
from worlds.prompts_run import model_server

PROMPT = "You are the clerk.\nComplete the order.\n{order}"
SAID = "[clerk] fax: expected seven words, found plain."


def ask(optimizer: ScriptedOptimizer, text: str, *, model: str = "editor", seed: int = 0) -> str:
    with model_server(easy(), optimizer) as server:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "seed": seed}
        answer = httpx.post(f"{server.base_url}/chat/completions", json=body).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def test_critic_turns_a_complaint_that_it_never_saw_before_into_advice() -> None:
    said = ask(ScriptedOptimizer(skill=1.0), f"<prompt>\n{PROMPT}\n</prompt>\n{SAID}", model="a-critic")
    assert "Advice: Write the fax as seven words." == said


def test_editor_follows_the_advice_it_is_given() -> None:
    said = ask(ScriptedOptimizer(), f"Edit <template>{PROMPT}</template> by this: Advice: Write the fax as EUR.")
    assert "You are the clerk.\nComplete the order.\nWrite the fax as EUR.\n{order}" == find_prompts(said)[0]


def test_one_call_gives_critique_and_prompt() -> None:
    said = ask(ScriptedOptimizer(skill=1.0), f"```\n{PROMPT}\n```\nIt went wrong: {SAID}")
    assert {"fax": "seven words"} == obeyed_styles(find_prompts(said)[0])


def test_complaints_about_another_role_are_left_to_it() -> None:
    optimizer = ScriptedOptimizer(skill=1.0)
    about = f"<prompt>{PROMPT.replace('clerk', 'checker')}</prompt> {SAID}"
    assert "fax" not in "".join(optimizer.answer(about, seed=seed) for seed in range(50))


def test_unskilled_critic_misreads() -> None:
    text = f"<prompt>{PROMPT}</prompt> {SAID}"
    right = sum("fax as seven words" in ScriptedOptimizer(skill=0.6).answer(text, seed=seed) for seed in range(300))
    assert 0.6 == pytest.approx(right / 300, abs=0.1)


def test_guesses_without_complaints_differ_by_seed_and_repeat_with_it() -> None:
    optimizer = ScriptedOptimizer()
    text = f"<prompt>{PROMPT}</prompt>"
    assert optimizer.answer(text, seed=1) == optimizer.answer(text, seed=1)
    assert 20 < len({optimizer.answer(text, seed=seed) for seed in range(60)})


def test_edit_replaces_a_line_about_the_same_field() -> None:
    once = edit(PROMPT, "Write the date as EUR.")
    assert once.replace("EUR", "ISO 8601") == edit(once, "Write the date as ISO 8601.")


def test_template_is_preferred_to_rendered_prompts() -> None:
    shown = "<run>You are the clerk. Order 7.</run>"
    assert [PROMPT, "You are the clerk. Order 7."] == find_prompts(f"{shown}\n```text\n{PROMPT}\n```")
    assert ["You are the clerk. Order 7."] == find_prompts(f"<all>{shown}</all>")
    assert [] == find_prompts("nothing here")


def test_answer_stands_between_the_tags_that_are_asked_for() -> None:
    said = ScriptedOptimizer().answer(
        f"<text>{PROMPT}</text> Advice: Write the fax as EUR. Answer between <n> and </n>."
    )
    assert said.endswith(f"<n>\n{edit(PROMPT, 'Write the fax as EUR.')}\n</n>")


def test_editor_removes_one_line_and_merges_two_prompts_when_told_to() -> None:
    date, name = "Write the date as EUR.", "Write the name as EUR."
    both = edit(edit(PROMPT, date), name)
    optimizer = ScriptedOptimizer()
    shorter = {optimizer.answer(f"<text>{both}</text> Remove the one line that helps least.", seed=n) for n in range(9)}
    assert {edit(PROMPT, date), edit(PROMPT, name)} == {find_prompts(said)[0] for said in shorter}
    merged = optimizer.answer(f"<a>{edit(PROMPT, date)}</a><b>{edit(PROMPT, name)}</b> Give the merged text.")
    assert [both] == find_prompts(merged)


@pytest.mark.parametrize(("mode", "holds"), [("garbage", "weather"), ("silent", ""), ("broken", "You are the clerk.")])
def test_misbehaving_modes_keep_no_placeholder(mode: Mode, holds: str) -> None:
    said = ask(ScriptedOptimizer(mode=mode), f"<prompt>{PROMPT}</prompt> {SAID}")
    assert "{order}" not in said
    assert holds in said


def test_dead_and_corrupt_endpoints_fail_after_the_calls_that_they_answered() -> None:
    optimizer = ScriptedOptimizer(mode="dead", after=1)
    text = f"<prompt>{PROMPT}</prompt> {SAID}"
    with model_server(easy(), optimizer) as server:
        body = {"model": "editor", "messages": [{"role": "user", "content": text}]}
        url = f"{server.base_url}/chat/completions"
        assert [200, 503] == [httpx.post(url, json=body).status_code for _ in range(2)]
        optimizer.mode = "corrupt"
        assert "html" in httpx.post(url, json=body).text
    assert 3 == optimizer.calls
