"""Spans to training rows: calls per second, growth, and what decoding or a quadratic matcher costs beside it.

Run alone: ``python -m benchmarks.bench_train``.
"""

import random
from collections.abc import Sequence

import msgspec

from agl.episodes import build_episode
from agl.schemas import Attempt, ModelCall, Rollout, Span, pack_floats, pack_ids
from benchmarks._harness import Case, Figure, interleave, rate_figure, table

AGENTS = 8
TURNS = 8
ROLLOUT = Rollout(rollout_id="r", task={}, group_id="g")
ATTEMPT = Attempt(attempt_id="r.1", rollout_id="r", number=1, worker="w")


def run(*, quick: bool) -> list[Figure]:
    """All rows of the table."""
    repeats = 1 if quick else 5
    return [*short_calls(repeats=repeats), *long_calls(repeats=repeats), *adversarial(repeats=min(repeats, 3))]


def short_calls(*, repeats: int) -> list[Figure]:
    small, large = conversations(2_000, response=10), conversations(20_000, response=10)
    data = msgspec.msgpack.encode(large)
    samples = interleave(
        {
            "small": episode_of(small),
            "large": episode_of(large),
            "decode": decode_of(data, len(large)),
            "naive small": naive_of(small),
        },
        repeats=repeats,
    )
    growth = samples["large"].cpu_s * len(large) / (samples["small"].cpu_s * len(small))
    return [
        rate_figure(
            "short calls to rows, 20,000 in one rollout",
            samples["large"],
            bar=50_000,
            baseline=samples["decode"],
            baseline_name="msgspec decode of the same spans",
        ),
        rate_figure(
            "short calls to rows, 2,000 in one rollout",
            samples["small"],
            bar=None,
            baseline=samples["naive small"],
            baseline_name="comparing each prompt with each earlier call, matching only",
        ),
        Figure(
            name="time at 20,000 calls over time at 2,000",
            value=growth,
            unit="x",
            bar=15,
            better="lower",
            baseline=10.0,
            baseline_name="exactly linear",
        ),
    ]


def long_calls(*, repeats: int) -> list[Figure]:
    spans = conversations(2_000, prompt=1_000, response=200)
    data = msgspec.msgpack.encode(spans)
    samples = interleave({"rows": episode_of(spans), "decode": decode_of(data, len(spans))}, repeats=repeats)
    return [
        rate_figure(
            "calls of 1,000 to 2,500 prompt tokens to rows",
            samples["rows"],
            bar=None,
            baseline=samples["decode"],
            baseline_name="msgspec decode of the same spans",
        )
    ]


def adversarial(*, repeats: int) -> list[Figure]:
    """Bytes of prompts per second where the structure is at its worst."""
    shapes = {
        "20,000 siblings of one prompt": [span(i, pack_ids(range(20)), pack_ids([i % 3, i, 1])) for i in range(20_000)],
        "one conversation of 2,000 turns": [
            span(i, pack_ids(range(20 * i + 1)), pack_ids([20 * i + 1])) for i in range(2_000)
        ],
        "2,000 nested prompts, longest first": [
            span(i, pack_ids([1] * (2_000 - i) * 10), pack_ids([1])) for i in range(2_000)
        ],
    }
    found: list[Figure] = []
    for name, spans in shapes.items():
        size = sum(one.call.prompt_len for one in spans if one.call)
        data = msgspec.msgpack.encode(spans)
        samples = interleave({"rows": episode_of(spans, size), "decode": decode_of(data, size)}, repeats=repeats)
        figure = rate_figure(
            f"prompt tokens: {name}",
            samples["rows"],
            bar=None,
            baseline=samples["decode"],
            baseline_name="msgspec decode of the same spans",
        )
        found.append(figure)
    return found


def conversations(calls: int, *, prompt: int = 20, response: int = 10) -> list[Span]:
    """Interleaved agents with conversations of :data:`TURNS` append-only turns each, and the agents' spans."""
    rng = random.Random(3)
    contexts: list[tuple[bytes, int]] = [(b"", 0)] * AGENTS
    spans = [agent(number) for number in range(AGENTS)]
    for i in range(calls):
        number = rng.randrange(AGENTS)
        context, turn = contexts[number]
        is_new = turn % TURNS == 0
        ids = [number, i, *(rng.randrange(50_000) for _ in range(prompt))] if is_new else [i, 1, 2, 3, 4]
        asked = pack_ids(ids) if is_new else context + pack_ids(ids)
        answer = pack_ids(rng.randrange(50_000) for _ in range(response))
        contexts[number] = (asked + answer, turn + 1)
        spans.append(span(i, asked, answer, parent=f"agent{number}"))
    return spans


def agent(number: int) -> Span:
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": f"agent{number}"}
    return Span(
        rollout_id="r",
        attempt_id="r.1",
        span_id=f"agent{number}",
        name="invoke_agent",
        start_ns=1,
        attributes=attributes,
    )


def span(i: int, prompt: bytes, response: bytes, *, parent: str | None = None) -> Span:
    call = ModelCall(
        request_id=f"q{i}",
        dialect="chat",
        model="m",
        policy="main",
        prompt_ids=prompt,
        response_ids=response,
        logprobs=pack_floats([-0.5] * (len(response) // 4)),
    )
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    return Span(
        rollout_id="r",
        attempt_id="r.1",
        span_id=f"c{i}",
        parent_id=parent,
        name="chat m",
        sequence=i + 1,
        start_ns=i + 2,
        attributes=attributes,
        call=call,
    )


def episode_of(spans: Sequence[Span], units: int | None = None) -> Case:
    calls = sum(1 for one in spans if one.call is not None)

    def run() -> int:
        build_episode(ROLLOUT, ATTEMPT, spans)
        return units or calls

    return run


def decode_of(data: bytes, units: int) -> Case:
    decoder = msgspec.msgpack.Decoder(list[Span])

    def run() -> int:
        decoder.decode(data)
        return units

    return run


def naive_of(spans: Sequence[Span]) -> Case:
    calls = [one.call for one in spans if one.call is not None]
    contexts = [call.prompt_ids + call.response_ids for call in calls]

    def run() -> int:
        for i, call in enumerate(calls):
            max((len(known) for known in contexts[:i] if call.prompt_ids.startswith(known)), default=0)
        return len(calls)

    return run


if __name__ == "__main__":
    print(table(run(quick=False)))
