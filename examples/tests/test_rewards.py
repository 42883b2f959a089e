"""The rewards of the examples read runs in which a model call failed and was tried again."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai", reason="the agents of some examples need openai")

EXAMPLES = Path(__file__).parents[1]
ANSWER = "BOOK oak: 42"
"""The answer of every model call: a text that any of the rewards can read."""

TOOL = {"function": {"name": "ask_coworker", "arguments": "{}"}}
GOOD = {"choices": [{"message": {"content": ANSWER, "tool_calls": [TOOL]}}]}
FAILED = {"error": {"message": "slow down"}}
NEEDS = {"equipment": [], "people": 20, "day": "Monday", "wheelchair": True, "hour": 9}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("calc", "ToolAndAnswer", {"answer": "42"}),
    ("crew", "DelegatedAndRight", {"answer": "42"}),
    ("glance", "Letters", {"letters": "AB"}),
    ("mixed", "FormIsRight", {"facts": {"city": "Bergen"}}),
    ("rooms", "RightRoom", {"needs": NEEDS}),
    ("team", "score", {"boxes": {"A": ANSWER, ANSWER: ANSWER}, "box": ANSWER}),
]


def spans(*responses: dict[str, Any]) -> list[Any]:
    return [SimpleNamespace(call=SimpleNamespace(response=response), span_id="s") for response in responses]


@pytest.mark.parametrize(("example", "name", "task"), CASES)
def test_a_failed_call_changes_no_reward(
    example: str, name: str, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / example))
    for module in ("agent", "house", "office"):
        monkeypatch.delitem(sys.modules, module, raising=False)  # that of another example
    made = runpy.run_path(str(EXAMPLES / example / "reward.py"))[name]
    reward = made() if isinstance(made, type) else made
    rollout = SimpleNamespace(task=task)
    plain, retried = (reward(rollout, spans(*calls)) for calls in ([GOOD, GOOD], [FAILED, GOOD, FAILED, GOOD]))
    assert plain == retried
