"""The choice of a replica is balanced, keeps conversations together, and avoids replicas that are gone."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from agl.served_calls import FEW
from agl_algo_verl.serving.replicas import REMEMBERED, Balance, digests

URLS = [f"http://host{number}/v1" for number in range(8)]
COMMON = [b"system", b"an example", b"its answer"]


@pytest.mark.parametrize("at_once", [1, 8, 64, 512])
def test_tasks_with_a_common_opening_are_spread_evenly(at_once: int) -> None:
    balance, draw = Balance(), random.Random(0)
    calls, kept = Counter[str](), 0
    tasks = [(f"task {number}".encode(), draw.randint(1, 6)) for number in range(1024)]
    running = list[tuple[float, list[bytes], int, str]]()
    now = 0.0

    def begin(messages: list[bytes], turns: int) -> None:
        url = balance.ranked(URLS, digests(messages))[0]
        calls[url] += 1
        balance.load.in_flight[url] += 1
        running.append((now + draw.expovariate(1.0), messages, turns, url))

    while tasks or running:
        while tasks and len(running) < at_once:
            task, turns = tasks.pop()
            begin([*COMMON, task], turns)
        running.sort(key=lambda call: -call[0])
        now, messages, turns, url = running.pop()
        balance.load.in_flight[url] -= 1
        balance.answered(url, digests(messages))
        if turns > 1:
            begin([*messages, b"answer", b"go on"], turns - 1)
            kept += running[-1][3] == url
    total = sum(calls.values())
    assert max(calls.values()) <= 1.3 * total / len(URLS)
    assert kept >= 0.9 * (total - 1024)  # continuations that met the replica of the call before


def test_rollouts_of_one_task_meet_until_their_replica_is_busy() -> None:
    balance, opening = Balance(), digests([b"system", b"task"])
    first = balance.ranked(URLS, opening)[0]
    balance.answered(first, opening)
    for _ in range(FEW):
        assert first == balance.ranked(URLS, opening)[0]
        balance.load.in_flight[first] += 1
    assert first != balance.ranked(URLS, opening)[0]
    balance.load.in_flight[first] -= FEW
    assert first == balance.ranked(URLS, opening)[0]


def test_a_replica_that_is_gone_ranks_last_for_a_while() -> None:
    now = 0.0
    balance, opening = Balance(clock=lambda: now), digests([b"task"])
    balance.answered(URLS[2], opening)
    balance.load.failed(URLS[2])
    assert URLS[2] == balance.ranked(URLS, opening)[-1]
    now = 5.0
    assert URLS[2] == balance.ranked(URLS, opening)[0]
    assert {URLS[0]} == set(balance.ranked(URLS[:1], opening))


def test_only_whole_calls_are_known_again() -> None:
    balance = Balance()
    balance.answered(URLS[3], digests([b"system", b"task"]))
    assert URLS[3] == balance.ranked(URLS, digests([b"system", b"task", b"answer", b"go on"]))[0]
    assert URLS[3] != balance.ranked(URLS, digests([b"system", b"another"]))[0]
    assert URLS[3] != balance.ranked(URLS, digests([b"systemtask"]))[0]
    assert digests([b"a", b"b"])[-1] != digests([b"ab"])[-1]


def test_as_many_calls_are_remembered_as_are_promised() -> None:
    balance = Balance()
    for number in range(REMEMBERED + 1):
        balance.answered(URLS[number % 8], digests([b"%d" % number]))
    balance.answered(URLS[1], [])
    assert URLS[1] == balance.ranked(URLS[:4], digests([b"1"]))[0]
    assert REMEMBERED == len(balance._readers)  # pyright: ignore[reportPrivateUsage]
