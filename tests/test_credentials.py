"""Clients that no hook reaches: programs that an agent starts call the model with the attempt's own credentials."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

AGENT = '''
import subprocess, sys

PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


def solve(task):
    """Lets another program ask the model, without httpx."""
    words = [sys.executable, "-c", PROGRAM, task["question"]]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
'''


def test_program_that_an_agent_of_the_process_runner_starts_reaches_the_model(
    agl: Callable[..., Any], experiment: Callable[..., Path]
) -> None:
    file = experiment(steps=2, runner="process", agent=AGENT)

    out, err = agl("run", str(file), cwd=file.parent).communicate(timeout=120)

    assert "finished toy" in out, out + err
    assert "rollouts failed" not in err
