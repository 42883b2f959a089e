"""The `command` runner: a program's output is kept in part, however long it is, and its last line is read."""

import asyncio
import json
import re
import sys
import time
import tracemalloc
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv
from agl.schemas import Attempt, Claim, Outcome, RetryPolicy, Rollout
from agl.schemas._ids import attempt_id_of, new_rollout_id
from agl.stores import MemoryStore
from agl_run import AgentSpec, RunContext
from agl_run.runners.command import HEAD, LINE, TAIL, CommandRunner, PrintedText

MB = 1 << 20


async def no_resources(rollout: Rollout) -> dict[str, object]:
    del rollout
    return {}


def run(program: str, *, timeout_s: float | None = None) -> Outcome:
    rollout = Rollout(rollout_id=new_rollout_id(), task={}, retry=RetryPolicy(timeout_s=timeout_s))
    attempt = Attempt(
        attempt_id=attempt_id_of(rollout.rollout_id, 1), rollout_id=rollout.rollout_id, number=1, worker="test"
    )
    spec = AgentSpec(command=(sys.executable, "-c", program))
    setup = RunContext(agent=spec, store=MemoryStore(), secret=b"a secret of these tests", resources=no_resources)
    return asyncio.run(CommandRunner(setup).execute(Claim(rollout=rollout, attempt=attempt)))


def printed_by(text: str) -> Outcome:
    """Return the outcome of a program that prints a text."""
    with NamedTemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        return run(f"import sys; sys.stdout.buffer.write(open({file.name!r}, 'rb').read())")


def output_of(outcome: Outcome) -> str:
    output = outcome.spans[0].attributes[semconv.OUTPUT]
    assert isinstance(output, str)
    return output


@pytest.mark.long
def test_program_that_prints_500_mb_is_read_in_a_few():
    program = f"""
import sys
print("first words")
for _ in range(500):
    sys.stdout.write("x" * {MB})
    sys.stderr.write("e" * 1024)
print()
print('{{"reward": 0.5}}')
"""
    tracemalloc.start()
    try:
        outcome = run(program)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ("succeeded", None) == (outcome.status, outcome.error)
    assert [0.5] == [span.reward.value for span in outcome.spans if span.reward]
    assert output_of(outcome).startswith("first words\nxxx")
    assert output_of(outcome).endswith('xxx\n{"reward": 0.5}\n')
    left_out = 500 * MB + len('first words\n\n{"reward": 0.5}\n') - HEAD - TAIL
    assert f"x\n[{left_out} bytes left out]\nx" in output_of(outcome)
    assert peak < 4 * MB


def test_failed_program_shows_how_its_complaints_began_and_ended():
    program = f"import sys; sys.stderr.write('cause\\n' + 'e' * {MB} + '\\nlast words\\n'); sys.exit(3)"
    error = run(program).error
    assert error is not None
    assert "the command ended with exit code 3: last words" == error.message
    assert error.traceback.startswith("cause\neee")


@pytest.mark.long
def test_program_that_is_stopped_shows_what_it_printed_and_its_unread_task_harms_nothing():
    started = time.monotonic()
    outcome = run("import time; print('so far', flush=True); time.sleep(60)", timeout_s=2.0)
    assert ("timeout", "so far\n") == (outcome.status, output_of(outcome))
    assert time.monotonic() - started < 30.0


@pytest.mark.parametrize(
    "last",
    [
        json.dumps({"reward": 0.5, "note": "\u2028 \u2029 \x85"}, ensure_ascii=False),
        json.dumps({"answer": "x" * 90_000, "reward": 0.5}),
        '{"api-key": "abcdefghijklmnop", "reward": 0.5}',
        '50 %\r{"reward": 0.5}\r\n \n',
        '{"reward": {"goal": 0.5}}',
    ],
)
def test_reward_in_the_last_line_is_read(last: str):
    spans = printed_by(f"working\n{last}\n").spans
    assert [0.5] == [span.reward.value or span.reward.dimensions["goal"] for span in spans if span.reward]


@pytest.mark.parametrize(
    "last", ["", "done", '{"reward": 0.5}\ndone', '{"reward": null}', "[1]", '{"answer": 1}', "[" * 9999]
)
def test_last_line_without_a_reward_is_none(last: str):
    outcome = printed_by(f"working\n{last}\n")
    assert ("succeeded", []) == (outcome.status, [span for span in outcome.spans if span.reward])


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ('{"reward": "1.0"}', r"the command printed the reward '1.0' \(str\); print a number"),
        ('{"reward": {}}', "the command printed the reward '{}'"),
        ('{"reward": [2]}', r"the command printed the reward '\[2\]'"),
        ('{"reward": NaN}', "nan as a reward"),
        (f'{{"reward": 1{"0" * 400}}}', "inf as a reward"),
        (
            json.dumps({"answer": "x" * LINE, "reward": 0.5}),
            "longer than 1048576 bytes, so that no reward in it is read",
        ),
    ],
)
def test_reward_that_cannot_be_read_is_an_error_that_says_so(last: str, said: str):
    outcome = printed_by(f"working\n{last}\n")
    assert outcome.error is not None
    assert ("failed", "agl.errors.RunError") == (outcome.status, outcome.error.type)
    assert re.search(said, outcome.error.message)


@given(st.lists(st.text("a \r\n", max_size=6), max_size=8))
def test_last_line_is_kept_however_it_comes(parts: list[str]):
    printed = PrintedText()
    for part in parts:
        printed.add(part.encode())
    lines = [line.strip() for line in "".join(parts).replace("\r", "\n").split("\n") if line.strip()]
    assert (lines[-1] if lines else "") == printed.last_line.decode()


@given(st.lists(st.integers(0, 50_000), max_size=8))
def test_kept_are_the_first_and_the_last_bytes_however_they_come(sizes: list[int]):
    data = bytes(97 + i % 23 for i in range(sum(sizes)))
    printed, start = PrintedText(), 0
    for size in sizes:
        printed.add(data[start : start + size])
        start += size
    if len(data) <= HEAD + TAIL:
        assert data.decode() == printed.text()
    else:
        gap = f"\n[{len(data) - HEAD - TAIL} bytes left out]\n"
        assert data[:HEAD].decode() + gap + data[-TAIL:].decode() == printed.text()
