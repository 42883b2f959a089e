import gc
import random
import re
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.episodes import Forest, build_episode, build_forest
from agl.episodes._prefix import NONE, common_prefix, link
from agl.errors import CaptureError
from agl.schemas import ModelCall, Row, Span, pack_floats, pack_ids, unpack_ids
from tests.cases import ATTEMPT, ROLLOUT, agent_span, call_span

Ids = tuple[int, ...]


def forest_of(*calls: tuple[Ids, Ids]) -> tuple[list[int], list[int]]:
    spans = [call_span(i + 1, prompt=prompt, response=response) for i, (prompt, response) in enumerate(calls)]
    forest = build_forest(spans)
    return forest.branch, forest.parent


def test_forest_two_interleaved_agents_give_two_rows() -> None:
    spans = [agent_span("a"), agent_span("b")]
    sampled: list[tuple[int, ...]] = []
    contexts: dict[str, Ids] = {"a": (1, 2), "b": (1, 3)}
    for turn in range(8):
        for agent in ("a", "b"):
            prompt = (*contexts[agent], 1000 + turn)
            response = tuple(2000 + 100 * turn + 10 * (agent == "b") + k for k in range(3))
            sampled.append(response)
            spans.append(call_span(len(sampled), prompt=prompt, response=response, parent=agent))
            contexts[agent] = (*prompt, *response)
    episode = build_episode(ROLLOUT, ATTEMPT, spans)
    assert 2 == len(episode.rows)
    trained = [token for row in episode.rows for token in trained_tokens(row)]
    assert sorted(token for response in sampled for token in response) == sorted(trained)
    assert not [token for token in trained if token < 2000]
    assert [8, 8] == [len(row.segments) for row in episode.rows]
    assert [{"a"}, {"b"}] == [{segment.agent for segment in row.segments} for row in episode.rows]
    assert [unpack_ids(row.ids) for row in episode.rows] == [list(contexts["a"]), list(contexts["b"])]


def test_forest_fork_starts_a_branch_with_the_shared_prefix_untrained() -> None:
    spans = [
        call_span(1, prompt=(1,), response=(2,)),
        call_span(2, prompt=(1, 2, 3), response=(4,)),
        call_span(3, prompt=(1, 2, 5), response=(6,)),
    ]
    episode = build_episode(ROLLOUT, ATTEMPT, spans)
    assert [0, 0, 1] == [t.branch for t in episode.transitions]
    assert [b"\x00\x01\x00\x01", b"\x00\x00\x00\x01"] == [row.mask for row in episode.rows]
    assert [[1, 2, 3, 4], [1, 2, 5, 6]] == [unpack_ids(row.ids) for row in episode.rows]


def test_forest_compaction_starts_a_branch() -> None:
    assert ([0, 0, 1], [-1, 0, -1]) == forest_of(((1, 2), (3,)), ((1, 2, 3, 4), (5,)), ((1, 9), (6,)))


def test_forest_equal_prompts_stay_separate_samples() -> None:
    assert ([0, 1, 2], [-1, -1, -1]) == forest_of(((1,), (2,)), ((1,), (2,)), ((1,), (3,)))


def test_forest_equal_conversations_continue_each_on_its_own_branch() -> None:
    calls = (((1,), (2,)), ((1,), (2,)), ((1, 2, 3), (4,)), ((1, 2, 3), (4,)), ((1, 2, 3), (4,)))
    assert ([0, 1, 1, 0, 2], [-1, -1, 1, 0, 1]) == forest_of(*calls)


def test_forest_prompt_equal_to_a_conversation_extends_it() -> None:
    assert ([0, 0], [-1, 0]) == forest_of(((1,), (2,)), ((1, 2), (3,)))


def test_forest_longest_conversation_wins() -> None:
    assert ([0, 0, 0], [-1, 0, 1]) == forest_of(((1,), (2,)), ((1, 2), (3,)), ((1, 2, 3, 4), (5,)))


def test_forest_later_conversation_is_not_extended_by_an_earlier_prompt() -> None:
    assert ([0, 1], [-1, -1]) == forest_of(((1, 2, 3), (4,)), ((1,), (2,)))


def test_forest_policies_do_not_share_branches() -> None:
    spans = [
        call_span(1, prompt=(1,), response=(2,), policy="p"),
        call_span(2, prompt=(1, 2, 3), response=(4,), policy="q"),
        call_span(3, prompt=(1, 2, 3), response=(4,), policy="p"),
    ]
    assert [0, 1, 0] == build_forest(spans).branch


def test_forest_calls_of_one_policy_share_branches_whatever_their_models_are_called() -> None:
    spans = [
        call_span(1, prompt=(1,), response=(2,), policy="p", model="first"),
        call_span(2, prompt=(1, 2, 3), response=(4,), policy="p", model="second"),
    ]
    assert [0, 0] == build_forest(spans).branch


def test_forest_models_without_a_policy_do_not_share_branches() -> None:
    spans = [
        call_span(1, prompt=(1,), response=(2,), policy="", model="first"),
        call_span(2, prompt=(1, 2, 3), response=(4,), policy="", model="second"),
        call_span(3, prompt=(1, 2, 3), response=(4,), policy="", model="first"),
    ]
    assert [0, 1, 0] == build_forest(spans).branch


def test_forest_lists_the_calls_of_each_branch_by_its_first_call() -> None:
    spans = [
        call_span(1, prompt=(1,), response=(2,), policy="p"),
        call_span(2, prompt=(1,), response=(2,), policy="q"),
        call_span(3, prompt=(9,), response=(8,), policy="p"),
        call_span(4, prompt=(1, 2, 3), response=(4,), policy="q"),
        call_span(5, prompt=(1, 2, 3), response=(4,), policy="p"),
    ]
    expected = Forest(branch=[0, 1, 2, 1, 0], parent=[-1, -1, -1, 1, 0], branches=[[0, 4], [1, 3], [2]])
    assert expected == build_forest(spans)


def test_forest_refuses_spans_without_a_call() -> None:
    with pytest.raises(CaptureError, match=r"got 2 spans and only 1 hold a model call; filter the others out first"):
        build_forest([agent_span("a"), call_span(1)])


def test_forest_empty_attempt_has_no_branches() -> None:
    assert [] == build_forest([]).branches


def test_forest_drift_is_counted_with_position_and_both_sides() -> None:
    spans = [
        call_span(1, prompt=(1, 2), response=(10, 11, 12)),
        call_span(2, prompt=(1, 2, 10, 11, 12, 3), response=(13, 14)),
        call_span(3, prompt=(1, 2, 10, 11, 12, 3, 13, 99, 4), response=(15,)),
    ]
    forest = build_forest(spans, decode=lambda ids: "-".join(map(str, ids)))
    assert [2] == list(forest.drift)
    drift = forest.drift[2]
    assert "differs from token 7 on" in drift
    assert "call c2" in drift
    assert "recorded ids [14] '14', sent ids [99, 4] '99-4'" in drift
    assert [0, 0, 1] == forest.branch


def test_forest_drift_before_the_answer_counts_within_the_slack() -> None:
    prompt = tuple(range(100, 140))
    spans = [
        call_span(1, prompt=(*prompt, 7, 8), response=(10, 11)),
        call_span(2, prompt=(*prompt, 9, 10, 11, 5), response=(12,)),
    ]
    assert 1 == len(build_forest(spans).drift)


LONG = tuple(range(100, 120))


def drift_of(*calls: tuple[Ids, Ids]) -> list[str]:
    """Return each call's drift, shortened to the position, the call that it nearly continues, and both sides."""
    spans = [call_span(i + 1, prompt=prompt, response=response) for i, (prompt, response) in enumerate(calls)]
    forest = build_forest(spans)
    pattern = r"drift: the prompt repeats a conversation and differs from token (\d+) on, at the answer of "
    return [re.sub(pattern, r"\1 ", text) for text in forest.drift.values()]


def test_forest_drift_in_what_a_fork_shares_with_its_origin_is_the_origins() -> None:
    first = (LONG, (10, 11, 12))
    second = ((*LONG, 10, 11, 12, 3, 3, 3, 3), (4,))
    fork = ((*LONG, 10, 11, 12, 5, 5, 5, 5), (6,))
    drifted = ((*LONG, 10, 99, 7), (8,))
    expected = ["21 call c1: recorded ids [11, 12, 5, 5, 5, 5, 6], sent ids [99, 7]"]
    assert expected == drift_of(first, second, fork, drifted)


def test_forest_drift_in_a_forks_own_answer_is_the_forks() -> None:
    calls = [(LONG, (10, 11)), ((*LONG, 10, 11, 3), (4,)), ((*LONG, 10, 11, 5), (6, 7)), ((*LONG, 10, 11, 5, 6, 9), ())]
    assert ["24 call c3: recorded ids [7], sent ids [9]"] == drift_of(*calls)


def test_forest_drift_before_what_a_new_conversation_shares_with_nobody_is_none() -> None:
    other = [
        call_span(1, prompt=LONG, response=(10, 11), policy="p"),
        call_span(2, prompt=LONG, response=(5,), policy="q"),
        call_span(3, prompt=(*LONG[:10], 7), response=(5,), policy="q"),
        call_span(4, prompt=(*LONG, 10, 11, 1), response=(5,), policy="p"),
    ]
    assert {} == build_forest(other).drift


def test_forest_drift_is_looked_for_in_the_nearest_conversation() -> None:
    calls = [(LONG, (10, 11)), ((*LONG[:5], 200), (1,)), ((*LONG, 10, 99), (1,))]
    assert ["21 call c1: recorded ids [11], sent ids [99]"] == drift_of(*calls)


@pytest.mark.parametrize(("position", "is_found"), [(12, False), (13, False), (14, True), (15, True), (16, True)])
def test_forest_drift_counts_an_eighth_of_the_prompt_before_an_answer(position: int, is_found: bool) -> None:
    prompt = LONG[:16]
    whole = (*prompt, 10, 11)
    assert is_found == bool(drift_of((prompt, (10, 11)), ((*whole[:position], 99, 98, 97), (1,))))


@pytest.mark.parametrize(("position", "is_found"), [(34, False), (35, False), (36, True), (37, True)])
def test_forest_drift_counts_at_most_the_slack_before_an_answer(position: int, is_found: bool) -> None:
    whole = (*range(100, 140), 10, 11)
    assert is_found == bool(drift_of((whole[:40], (10, 11)), ((*whole[:position], 99, 98, 97), (1,))))


@pytest.mark.parametrize("length", [4, 12])
def test_forest_drift_of_a_dropped_empty_block_of_reasoning_is_found_in_the_first_turn(length: int) -> None:
    """With ``enable_thinking=false``, the prompt ends in an empty block, which many templates drop in later prompts."""
    start, block, first, second = (100, 101, 102), tuple(range(20, 20 + length)), (10, 11, 14, 2), (12, 15, 16, 2)
    calls = [
        ((*start, *block), first),
        ((*start, *first, 103, *block), second),
        ((*start, *first, 103, *second, 104, *block), (13, 2)),
    ]
    recorded = [*block, *first][:8]
    assert [f"3 call c1: recorded ids {recorded}, ", "8 call c2: "] == [
        text.partition("sent" if text.startswith("3") else "recorded")[0] for text in drift_of(*calls)
    ]
    assert [] == drift_of(calls[0], ((*start, 105, *block), (13, 2)))


def test_forest_short_answer_at_the_start_of_another_question_is_no_drift() -> None:
    assert [] == drift_of(((*LONG, *range(50, 62)), (7,)), ((*LONG, 7, 60, 61, 62), (8,)))


def test_forest_drift_shows_eight_tokens_of_either_side() -> None:
    recorded, sent = tuple(range(10)), tuple(range(50, 62))
    (text,) = drift_of((LONG, (7, *recorded)), ((*LONG, 7, *sent), (1,)))
    assert f"21 call c1: recorded ids {list(recorded[:8])}, sent ids {list(sent[:8])}" == text


@pytest.mark.parametrize(
    "second",
    [
        pytest.param((1, 2, 3, 10, 4, 9), id="fork after an exact continuation"),
        pytest.param((1, 2, 3), id="sibling"),
        pytest.param((1, 8, 9, 10), id="other prompt"),
        pytest.param((1, 2, 3, 10, 4), id="continuation"),
    ],
)
def test_forest_exact_branches_are_no_drift(second: Ids) -> None:
    spans = [
        call_span(1, prompt=(1, 2, 3), response=(10,)),
        call_span(2, prompt=(1, 2, 3, 10, 4, 5), response=(11,)),
        call_span(3, prompt=second, response=(12,)),
    ]
    assert 0 == len(build_forest(spans).drift)


def test_forest_fork_is_not_compared_with_the_other_side_of_its_origin() -> None:
    spans = [
        call_span(1, prompt=(1,), response=(2,)),
        call_span(2, prompt=(1, 2, 3), response=(4, 4, 4, 4)),
        call_span(3, prompt=(1, 2, 5, 6, 7, 8, 9), response=(5,)),
        call_span(4, prompt=(1, 2, 5, 6, 3), response=(6,)),
    ]
    assert 0 == len(build_forest(spans).drift)


def test_forest_fork_beside_a_prompt_without_new_tokens_is_no_drift() -> None:
    spans = [
        call_span(1, prompt=(1,), response=(2,)),
        call_span(2, prompt=(1, 2), response=(3,)),
        call_span(3, prompt=(1, 2, 9), response=(4,)),
    ]
    assert 0 == len(build_forest(spans).drift)


@given(st.binary(max_size=9000), st.binary(max_size=50), st.binary(max_size=50))
def test_common_prefix_matches_a_byte_by_byte_comparison(shared: bytes, a: bytes, b: bytes) -> None:
    left, right = shared * 3 + a, shared * 3 + b
    expected = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right))
    )
    assert expected == common_prefix(left, right)


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 8192, 9000])
@pytest.mark.parametrize("changed", [0x01, 0x40, 0x80, 0xFF])
def test_common_prefix_ends_where_the_first_bit_differs(length: int, changed: int) -> None:
    left = bytes(length) + bytes([changed]) + bytes(20)
    assert length == common_prefix(left, bytes(length + 21))
    assert length == common_prefix(left, bytes(length))
    assert len(left) == common_prefix(left, left + b"more")


@given(st.lists(st.tuples(st.text("ab", max_size=5), st.text("ab", max_size=3)), max_size=25))
def test_link_finds_the_longest_earlier_entry_and_the_nearest_one(pairs: list[tuple[str, str]]) -> None:
    queries = [query.encode() for query, _ in pairs]
    entries = [(query + rest).encode() for query, rest in pairs]
    links = link(queries, entries)
    for i, query in enumerate(queries):
        inside = [entry for entry in entries[:i] if query.startswith(entry)]
        anchor = links.anchor[i]
        assert max(inside, key=len, default=None) == (None if anchor == NONE else entries[anchor])
        assert anchor < i
        nearest = max((common_prefix(query, entry) for entry in entries[:i]), default=0)
        found = [j for j in (links.before[i], links.after[i]) if j != NONE]
        assert nearest == max((common_prefix(query, entries[j]) for j in found), default=0)
        assert all(j < i for j in found)
    by_content = {entry: {links.same[j] for j, other in enumerate(entries) if other == entry} for entry in entries}
    assert all(len(same) == 1 for same in by_content.values())


def trained_tokens(row: Row) -> list[int]:
    return [token for token, is_trained in zip(unpack_ids(row.ids), row.mask, strict=True) if is_trained]


def long_attempt(calls: int, *, agents: int = 8) -> list[Span]:
    """Return the calls of several agents in turn, whose conversations are compacted every eight turns."""
    rng = random.Random(7)
    contexts = [b""] * agents
    spans: list[Span] = []
    for i in range(calls):
        agent = rng.randrange(agents)
        fresh = len(contexts[agent]) > 800 or not contexts[agent]
        prompt = pack_ids([agent, i, *range(18)]) if fresh else contexts[agent] + pack_ids([i, 1, 2, 3, 4])
        response = pack_ids([i, *range(9)])
        contexts[agent] = prompt + response
        spans.append(packed_span(i, prompt, response))
    return spans


def packed_span(i: int, prompt: bytes, response: bytes) -> Span:
    call = ModelCall(
        request_id=f"q{i}",
        dialect="chat",
        model="m",
        prompt_ids=prompt,
        response_ids=response,
        logprobs=pack_floats([-0.5] * (len(response) // 4)),
    )
    return Span(rollout_id="r", attempt_id="r.1", span_id=f"c{i}", name="chat m", sequence=i + 1, call=call)


def siblings(calls: int) -> list[Span]:
    prompt = pack_ids(range(20))
    return [packed_span(i, prompt, pack_ids([i % 3, i, 1, 2, 3])) for i in range(calls)]


def copies_in_reverse(calls: int) -> list[Span]:
    """Return the prefixes of a conversation from long to short, so that each is a prefix of all earlier ones."""
    return [packed_span(i, pack_ids([1] * (calls - i)), pack_ids([1])) for i in range(calls)]


def one_conversation(calls: int) -> list[Span]:
    return [packed_span(i, pack_ids(range(1 + 2 * i)), pack_ids([2 * i + 1])) for i in range(calls)]


def costs(*attempts: Sequence[Span]) -> list[float]:
    """Return the least CPU seconds for each attempt over several interleaved runs, without garbage collection."""
    best = [float("inf")] * len(attempts)
    gc.disable()
    try:
        for _ in range(5):
            for i, spans in enumerate(attempts):
                started = time.process_time()
                build_episode(ROLLOUT, ATTEMPT, spans)
                best[i] = min(best[i], time.process_time() - started)
    finally:
        gc.enable()
    return best


@pytest.mark.long
@pytest.mark.parametrize("make", [long_attempt, siblings])
def test_forest_time_grows_linearly_to_20000_calls(make: Callable[[int], list[Span]]) -> None:
    attempts = make(2_000), make(20_000)
    # Ten times the calls; a busy machine's caches add some, and quadratic time would be a hundred times as much.
    assert any(large / small <= 25 for small, large in (costs(*attempts) for _ in range(3)))


@pytest.mark.parametrize("make", [copies_in_reverse, one_conversation])
def test_forest_time_per_byte_does_not_grow_with_nesting(make: Callable[[int], list[Span]]) -> None:
    attempts = make(500), make(2_000)
    sizes = [sum(len(span.call.prompt_ids) for span in spans if span.call) for spans in attempts]
    per_byte = [cost / size for cost, size in zip(costs(*attempts), sizes, strict=True)]
    assert per_byte[1] / per_byte[0] <= 3


Step = tuple[str, int, Ids, Ids]
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "fork", "compact", "retry", "cut", "parallel", "choices", "error"]),
        st.integers(0, 7),
        TOKENS,
        TOKENS,
    ),
    min_size=1,
    max_size=30,
)


class Simulation:
    """Agents that talk to models; records calls as a gateway would, and knows which calls should be in rows."""

    def __init__(self, agents: int) -> None:
        self.agents = agents
        self.contexts: dict[int, list[Ids]] = {}
        self.spans: list[Span] = []
        self.kept: list[tuple[str, Ids, Ids]] = []

    def play(self, step: Step) -> None:
        kind, number, observed, answer = step
        agent = number % self.agents
        known = self.contexts.setdefault(agent, [(9, agent)])
        base = known[number % len(known)] if kind == "fork" else (9, agent) if kind == "compact" else known[-1]
        prompt = (*base, *observed)
        if kind == "retry":
            self.record(
                agent, prompt, answer[:1], request=f"q{len(self.spans)}", retry=0, is_complete=False, kept=False
            )
            self.record(agent, prompt, answer, request=f"q{len(self.spans) - 1}", retry=1)
        elif kind == "cut":
            self.record(agent, prompt, answer, is_complete=False, kept=False)
        elif kind == "error":
            self.record(agent, prompt, (), status=500, kept=False)
            return
        elif kind == "parallel":
            for tool in range(3):
                self.record(agent, (*prompt, tool), answer)
            prompt = (*prompt, 0)
        elif kind == "choices":
            request = f"q{len(self.spans)}"
            for choice in range(2):
                self.record(agent, prompt, answer, request=request, choice=choice)
        else:
            self.record(agent, prompt, answer)
        known.append((*prompt, *answer))

    def record(
        self,
        agent: int,
        prompt: Ids,
        response: Ids,
        *,
        request: str = "",
        retry: int = 0,
        choice: int = 0,
        status: int = 200,
        is_complete: bool = True,
        kept: bool = True,
    ) -> None:
        number = len(self.spans) + 1
        span = call_span(
            number,
            prompt=prompt,
            response=response,
            parent=f"agent{agent}",
            request_id=request or f"q{number - 1}",
            retry_count=retry,
            choice=choice,
            status_code=status,
            is_complete=is_complete,
        )
        self.spans.append(span)
        if kept:
            self.kept.append((span.span_id, prompt, response))


class NaiveRow:
    def __init__(self, ids: Ids) -> None:
        self.ids: list[int] = list(ids)
        self.mask = [0] * len(ids)
        self.logprobs = [0.0] * len(ids)
        self.calls: list[str] = []

    def add(self, name: str, prompt: Ids, response: Ids) -> None:
        observed = prompt[len(self.ids) :]
        self.ids += [*observed, *response]
        self.mask += [0] * len(observed) + [1] * len(response)
        self.logprobs += [0.0] * len(observed) + logprobs_of(name, response)
        self.calls.append(name)


def logprobs_of(name: str, response: Ids) -> list[float]:
    return [-float(int(name[1:])) - k / 4 for k in range(len(response))]


def naive_rows(calls: Sequence[tuple[str, Ids, Ids]]) -> list[NaiveRow]:
    """Return the rows by a simple quadratic algorithm.

    Each call extends the longest earlier conversation that is a prefix; of equal ones, the newest that is still open.
    """
    rows: list[NaiveRow] = []
    done: list[tuple[Ids, NaiveRow, list[bool]]] = []
    for name, prompt, response in calls:
        found = [entry for entry in done if prompt[: len(entry[0])] == entry[0]]
        longest = max((len(entry[0]) for entry in found), default=0)
        leaves = [entry for entry in found if len(entry[0]) == longest and entry[2][0]]
        if leaves:
            _, row, is_open = leaves[-1]
            is_open[0] = False
        else:
            row = NaiveRow(())
            row.ids, row.mask, row.logprobs = list(prompt), [0] * len(prompt), [0.0] * len(prompt)
            rows.append(row)
        row.add(name, prompt, response)
        done.append(((*prompt, *response), row, [True]))
    return rows


@settings(max_examples=300)
@given(agents=st.integers(1, 8), steps=STEPS, seed=st.randoms(use_true_random=False))
def test_forest_rebuilds_every_row_of_random_call_forests(agents: int, steps: list[Step], seed: random.Random) -> None:
    simulation = Simulation(agents)
    for step in steps:
        simulation.play(step)
    spans = [*simulation.spans, *(agent_span(f"agent{i}") for i in range(agents))]
    seed.shuffle(spans)
    episode = build_episode(ROLLOUT, ATTEMPT, spans)
    expected = naive_rows(simulation.kept)
    assert [pack_ids(row.ids) for row in expected] == [row.ids for row in episode.rows]
    assert [bytes(row.mask) for row in expected] == [row.mask for row in episode.rows]
    assert [pack_floats(row.logprobs) for row in expected] == [row.logprobs for row in episode.rows]
    assert [row.calls for row in expected] == [[s.span_id for s in row.segments] for row in episode.rows]
    kept = {name for name, _, _ in simulation.kept}
    assert [span.span_id for span in simulation.spans] == [t.span_id for t in episode.transitions]
    assert kept == {t.span_id for t in episode.transitions if not t.reject}
    assert sum(len(response) for _, _, response in simulation.kept) == sum(row.mask.count(1) for row in episode.rows)
