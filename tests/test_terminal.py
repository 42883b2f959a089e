"""The text of agents and models, as the commands print it: a terminal shows it and never obeys it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

AGENT = r'''
import logging
import openai


def solve(task):
    """Fails on every other task, and logs as libraries do."""
    number = int("".join(filter(str.isdigit, task["question"])))
    if number % 2:
        logging.getLogger("tools").warning("the tool said \x1b]0;owned\x07")
        raise ValueError("bad tool \x1b[31mred")
    with openai.OpenAI() as client:
        messages = [{"role": "user", "content": task["question"]}]
        try:
            raise LookupError("lost \x9b31m")
        except LookupError:
            logging.getLogger("tools").exception("no such page")
        return client.chat.completions.create(model="scripted", messages=messages).choices[0].message.content
'''


def test_log_of_a_run_escapes_control_characters_and_keeps_the_lines_of_tracebacks(
    agl: Callable[..., Any], experiment: Callable[..., Path]
) -> None:
    file = experiment(steps=2, agent=AGENT)

    out, err = agl("run", str(file), cwd=file.parent).communicate(timeout=120)

    assert [] == [character for character in "\x1b\x07\x9b" if character in out + err]
    assert r"bad tool \x1b[31mred" in err
    assert r"WARNING: the tool said \x1b]0;owned\x07" in err.splitlines()
    assert "Traceback (most recent call last):" in err.splitlines()
