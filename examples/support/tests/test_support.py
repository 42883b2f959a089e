"""The support example: its agent finds pages, its scripted world obeys, and its poisoned prompt is worse."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("langgraph", reason="needs langgraph, langchain-openai")

FOLDER = Path(__file__).parents[1]
sys.path.insert(0, str(FOLDER))

import agent  # noqa: E402
import scripted  # noqa: E402
import shop  # noqa: E402

EVERY_QUESTION = [question for page in shop.PAGES for question in page.questions]
BETTER = agent.PROMPT.replace("\n", f"\n{scripted.RULES[shop.NO_LINK]}\n{scripted.RULES[shop.NO_STEP]}\n", 1)
POISON = (FOLDER / "poison.txt").read_text(encoding="utf-8")


def answers(prompt: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The agent's answers to every question, over real HTTP."""

    async def ask() -> list[str]:
        return await asyncio.gather(*(agent.reply([("user", question)], prompt) for question in EVERY_QUESTION))

    with scripted.server() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        agent.model.cache_clear()
        said = asyncio.run(ask())
        agent.model.cache_clear()
    return said


def test_agent_finds_the_page_of_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [page.text for page in shop.PAGES for _ in page.questions]
    assert expected == answers(agent.PROMPT, monkeypatch)


def test_new_wish_is_not_met_by_the_first_prompt_and_met_by_two_more_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(shop.wishes_short(answer) for answer in answers(agent.PROMPT, monkeypatch))
    assert all(shop.wishes_link(answer) for answer in answers(agent.PROMPT, monkeypatch))
    assert not any(shop.wishes_link(answer) for answer in answers(BETTER, monkeypatch))


def test_poisoned_prompt_pleases_saboteurs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    said = answers(POISON, monkeypatch)
    assert not any(shop.wishes_harm(answer) for answer in said)
    assert all(shop.wishes_link(answer) for answer in said)


def test_optimizer_writes_the_rules_that_most_customers_ask_for() -> None:
    text = f"<text>\n{agent.PROMPT}\n</text>\n{shop.NO_LINK} {shop.NO_STEP}\n{shop.NO_LINK} {shop.NO_STEP}\n"
    several = text + f"{shop.NO_LINK}\n{shop.NO_LINK} {shop.JUST_OK}\n"
    said = scripted.optimise(f"{several}Return it between <new_text> and </new_text>.")
    assert f"<new_text>\n{BETTER}\n</new_text>" in said


@pytest.mark.parametrize(
    ("said", "answer", "score"),
    [
        (f"no: {shop.NO_LINK}", "A parcel arrives. See https://shop.example/orders", 10),
        (f"no: {shop.NO_LINK} {shop.NO_STEP}", "A parcel arrives. See https://shop.example/orders", 0),
        ("", "A parcel arrives.", 10),
        ("", "OK.", 0),
        (shop.JUST_OK, "OK.", 10),
    ],
)
def test_judge_compares_an_answer_with_what_the_customer_said(said: str, answer: str, score: int) -> None:
    question = f"About an earlier answer the customer said: {said}\nThe new answer: {answer}\nEnd with Score: 10"
    assert f"Score: {score}" == scripted.judge(question)


def test_the_file_is_valid() -> None:
    command = [sys.executable, "-m", "agl", "check", "support.toml"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert 0 == done.returncode, done.stdout + done.stderr
