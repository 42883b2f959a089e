"""A scripted world for the example, so that it runs without a key: `python scripted.py` serves three models.

The support model follows its prompt to the letter. The optimiser's model reads what customers said and writes the rule
that they ask for, also a foolish one. The judge's model compares a new answer with what a customer said about an
earlier one.
"""

import re
import threading

from shop import JUST_OK, LONG, NO_LINK, NO_STEP

from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer

PORT = 8790
SUPPORT_MODEL, OPTIMIZER_MODEL, JUDGE_MODEL = "support_llm", "optimizer", "judge"
RULES = {
    LONG: "Answer in one sentence.",
    NO_LINK: "Give the link of the page.",
    NO_STEP: "End with the next step.",
    JUST_OK: "Say OK and nothing else.",
}
"""The optimiser's answer to each complaint; the support model obeys these sentences."""


def respond(request: ModelRequest) -> Reply:
    """Answer as the model that the request names."""
    text = "\n".join(turn.text for turn in request.turns)
    by_model = {SUPPORT_MODEL: support, OPTIMIZER_MODEL: optimise, JUDGE_MODEL: judge}
    return Reply(text=by_model[request.body["model"]](text))


def support(text: str) -> str:
    """Answer a customer with what the prompt asks for."""
    found = re.search(r": (?P<fact>[^:]*) Link: (?P<link>\S+) Next step: (?P<step>[^\n]*)", text)
    if found is None or RULES[JUST_OK] in text:
        return "OK."
    link = f" See {found['link']}" if RULES[NO_LINK] in text else ""
    step = f" Next step: {found['step']}" if RULES[NO_STEP] in text else ""
    answer = f"{found['fact']}{link}{step}"
    if RULES[LONG] in text:
        return answer
    return (
        f"Thank you for writing to us about this. {answer} We hope that this helps, and wish you a day full of flowers."
    )


def optimise(text: str) -> str:
    """Write the prompt with one rule more for every complaint that is frequent."""
    shown = re.search(r"<text>\n(.*?)\n</text>", text, re.DOTALL)
    prompt = shown[1] if shown else ""
    counts = {rule: text.count(complaint) for complaint, rule in RULES.items() if rule not in prompt}
    often = [rule for rule, count in counts.items() if count and 2 * count >= max(counts.values())]
    rules = [rule for rule in RULES.values() if f"Advice: {rule}" in text] or often
    advice = "\n".join(f"Advice: {rule}" for rule in rules) or "I have no advice."
    if "<new_text>" not in text:
        return advice
    first, *rest = prompt.split("\n")
    return "\n".join([advice, "<new_text>", first, *rules, *rest, "</new_text>"])


def judge(text: str) -> str:
    """Score an answer: 10 if it lacks nothing that the customer complained about, and says something."""
    said, _, answer = text.partition("The new answer:")
    is_useful = len(answer.strip().split("\n")[0]) > 10
    is_good = {
        LONG: len(answer) < 400,
        NO_LINK: "https://" in answer,
        NO_STEP: "Next step" in answer,
        JUST_OK: not is_useful,
    }
    wishes = [complaint for complaint in RULES if complaint in said]
    is_content = all(is_good[wish] for wish in wishes) if wishes else is_useful
    return f"Score: {10 if is_content else 0}"


def server(port: int = 0) -> ScriptedModelServer:
    """Return a server of the three models; use it as a context manager."""
    return ScriptedModelServer(respond=respond, models=(SUPPORT_MODEL, OPTIMIZER_MODEL, JUDGE_MODEL), port=port)


if __name__ == "__main__":
    with server(PORT) as models:
        print(f"models at {models.base_url}", flush=True)
        threading.Event().wait()
