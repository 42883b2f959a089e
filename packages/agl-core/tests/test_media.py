"""Pictures in model calls: read from answers, compared by digest, carried to rows or rejected with the reason."""

from itertools import count

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl.dialects import Exchange, Request, calls_of, dialect_of
from agl.episodes import EpisodeOptions, build_episode, build_forest
from agl.schemas import (
    MediaSpan,
    ModelCall,
    Span,
    Transition,
    decode,
    digest_of,
    encode,
    identity_ids,
    pack_floats,
    pack_ids,
    unpack_ids,
)
from tests.cases import ATTEMPT, ROLLOUT, call_span

PROCESSOR = "Qwen2VLProcessor 5.23.0 1a2b3c4d"
PAD = 7
Part = int | str
"""A token, or a picture that takes one placeholder token for each of its letters."""


def picture(name: str, *, offset: int, length: int = 2) -> MediaSpan:
    digest = digest_of(name.encode())
    return MediaSpan(offset=offset, length=length, modality="image", digest=digest, grid=(1, length))


def rendered(parts: tuple[Part, ...]) -> tuple[tuple[int, ...], tuple[MediaSpan, ...]]:
    """Return the ids of a prompt with pictures as a model gets them, and where the pictures lie."""
    ids: list[int] = []
    media: list[MediaSpan] = []
    for part in parts:
        if isinstance(part, str):
            media.append(picture(part, offset=len(ids), length=len(part)))
        ids += [PAD] * len(part) if isinstance(part, str) else [part]
    return tuple(ids), tuple(media)


def seen_span(number: int, parts: tuple[Part, ...], response: tuple[int, ...], **call) -> Span:
    ids, media = rendered(parts)
    given = {"processor": PROCESSOR if media else "", "inputs": tuple(each.digest for each in media), "media": media}
    return call_span(number, prompt=ids, response=response, **{**given, **call})


def only_transition(span: Span, processor: str | None = PROCESSOR) -> Transition:
    (transition,) = build_episode(ROLLOUT, ATTEMPT, [span], options=EpisodeOptions(processor=processor)).transitions
    return transition


def test_identity_of_ids_without_pictures_is_the_ids_themselves() -> None:
    ids = pack_ids([1, 2])
    assert ids is identity_ids(ids, ())


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20), st.integers(0, 3), st.integers(1, 20))
def test_identity_differs_only_where_the_picture_lies(one: str, other: str, offset: int, length: int) -> None:
    ids = [PAD] * 25
    first, second = (
        unpack_ids(identity_ids(pack_ids(ids), [picture(name, offset=offset, length=length)])) for name in (one, other)
    )
    assert (one == other) is (first == second)
    assert [PAD] * (25 - length) == first[:offset] + first[offset + length :]
    assert max(first[offset : offset + length]) < 0


def test_identity_ignores_a_picture_beyond_the_prompt() -> None:
    assert pack_ids([1, 2]) == identity_ids(pack_ids([1, 2]), [picture("a", offset=5)])
    assert 8 == len(identity_ids(pack_ids([1, 2]), [picture("a", offset=1, length=9)]))


def test_forest_500_pairs_that_differ_only_in_the_picture_never_share_a_branch() -> None:
    turns = [(f"{at:04d}", turn) for turn in range(2) for at in range(1000)]
    spans = [
        seen_span(number, (1, name, 2, *(3, 4) * turn), (3,)) for number, (name, turn) in enumerate(turns, start=1)
    ]
    forest = build_forest(spans)
    assert [[at, at + 1000] for at in range(1000)] == forest.branches


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([1, 2, "a", "b", "aa"]), min_size=1, max_size=4).map(tuple),
        st.integers(0, 2),  # how many of the conversation's calls the prompt repeats
        st.sampled_from([(1,), (2,), (1, 2)]),
    ),
    max_size=12,
)


@given(PROMPTS)
@settings(max_examples=200)
def test_forest_with_pictures_is_the_forest_of_texts_with_a_token_for_each_picture(prompts) -> None:
    names: dict[str, int] = {}
    numbers = count(1000)
    spoken: list[tuple[Part, ...]] = [()]
    pictures: list[Span] = []
    texts: list[Span] = []
    for number, (parts, back, response) in enumerate(prompts, start=1):
        prompt = (*spoken[max(0, len(spoken) - 1 - back)], *parts)
        spoken.append((*prompt, *response))
        pictures.append(seen_span(number, prompt, response))
        plain = [
            token
            for part in prompt
            for token in ([names.setdefault(part, next(numbers))] * len(part) if isinstance(part, str) else [part])
        ]
        texts.append(call_span(number, prompt=tuple(plain), response=response))
    with_pictures, of_texts = build_forest(pictures), build_forest(texts)
    assert of_texts.branches == with_pictures.branches
    assert of_texts.parent == with_pictures.parent


def test_forest_describes_drift_after_a_picture_with_the_real_ids() -> None:
    spans = [seen_span(1, (1, 2, 3, "aa"), (5, 6)), seen_span(2, (1, 2, 3, "aa", 8, 6, 9), (5,))]
    (text,) = build_forest(spans, decode=lambda ids: "".join(map(chr, ids))).drift.values()
    assert "recorded ids [5, 6]" in text
    assert "sent ids [8, 6, 9]" in text


def test_row_has_the_pictures_of_its_whole_conversation() -> None:
    spans = [seen_span(1, (1, "aa", 2), (3,)), seen_span(2, (1, "aa", 2, 3, "b", 4), (5,))]
    (row,) = build_episode(ROLLOUT, ATTEMPT, spans, options=EpisodeOptions(processor=PROCESSOR)).rows
    assert [1, PAD, PAD, 2, 3, PAD, 4, 5] == unpack_ids(row.ids)
    assert (picture("aa", offset=1), picture("b", offset=5, length=1)) == row.media
    assert PROCESSOR == row.processor
    assert row == decode(encode(row), type(row))


@pytest.mark.parametrize(
    ("call", "processor", "detail"),
    [
        ({}, "", f"1 inputs are not tokens: {digest_of(b'aa')}"),
        ({"inputs": ()}, "", f"1 inputs are not tokens: {digest_of(b'aa')}"),
        ({"inputs": ("file-1",)}, PROCESSOR, "1 inputs are not tokens: file-1"),
        (
            {"processor": "Q 1 00"},
            PROCESSOR,
            f"the pictures went through the processor 'Q 1 00', and rows need {PROCESSOR!r}",
        ),
        (
            {"processor": ""},
            PROCESSOR,
            f"the pictures went through the processor '', and rows need {PROCESSOR!r}",
        ),
        (
            {"media": (picture("aa", offset=3),)},
            PROCESSOR,
            "the record has a picture at token 3 with 2 tokens, in a prompt of 4",
        ),
    ],
)
def test_call_whose_pictures_do_not_fit_is_rejected_with_the_reason(call, processor: str, detail: str) -> None:
    found = only_transition(seen_span(1, (1, "aa", 2), (3,), **call), processor)
    assert ("non_token_input", detail) == (found.reject, found.detail)


def test_call_with_pictures_of_the_own_processor_trains() -> None:
    found = only_transition(seen_span(1, (1, "aa", 2), (3,)))
    assert ("", (picture("aa", offset=1),), PROCESSOR) == (found.reject, found.media, found.processor)


def test_reader_who_only_looks_accepts_pictures_of_any_processor() -> None:
    assert "" == only_transition(seen_span(1, (1, "aa", 2), (3,)), None).reject
    assert "non_token_input" == only_transition(seen_span(1, (1, "aa", 2), (3,), media=()), None).reject


# Reading from answers

IDS = [1, PAD, PAD, 2]
MEDIA = [{"offset": 1, "length": 2, "modality": "image", "digest": digest_of(b"a"), "grid": [1, 2]}]
TOKENS = {"prompt_token_ids": IDS, "token_ids": [3], "logprobs": [-1.0]}


def answer_of(path: str, *, is_streamed: bool, **media) -> bytes:
    """Return an answer of agl's policy server in one of the formats, with the fields ``media`` next to the ids."""
    chat = {"token_ids": [3], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}
    plain = {
        "/v1/chat/completions": {"choices": [{"message": {"content": "x"}, **chat}], "prompt_token_ids": IDS},
        "/v1/completions": {"choices": [{"text": "x", **chat}], "prompt_token_ids": IDS},
        "/v1/responses": {"output": [], "status": "completed", **TOKENS},
        "/v1/messages": {"content": [], "stop_reason": "end_turn", **TOKENS},
    }[path]
    events = {
        "/v1/chat/completions": [
            {"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": IDS, **media},
            {"choices": [{"delta": {"content": "x"}, **chat}]},
        ],
        "/v1/completions": [{"choices": [{"text": "x", **chat}], "prompt_token_ids": IDS, **media}],
        "/v1/responses": [{"type": "response.completed", "response": {**plain, **media}}],
        "/v1/messages": [
            {"type": "message_start", "message": {"content": []}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, **TOKENS, **media},
            {"type": "message_stop"},
        ],
    }[path]
    if is_streamed:
        return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    return msgspec.json.encode({**plain, **media})


def read(path: str, answer: bytes, *, is_streamed: bool = False) -> ModelCall:
    dialect = dialect_of(path)
    assert dialect is not None
    request = Request(dialect, b'{"model": "m"}')
    (call,) = calls_of(Exchange(request=request, request_id="r", status=200, response=answer, is_streamed=is_streamed))
    return call


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_answer_gives_the_call_its_pictures_and_keeps_them_out_of_the_response(path: str, is_streamed: bool) -> None:
    answer = answer_of(path, is_streamed=is_streamed, prompt_media=MEDIA, processor=PROCESSOR)
    call = read(path, answer, is_streamed=is_streamed)
    assert (pack_ids(IDS), pack_ids([3]), pack_floats([-1.0]), "") == (
        *(call.prompt_ids, call.response_ids, call.logprobs),
        call.ids_missing,
    )
    assert ((picture("a", offset=1),), PROCESSOR) == (call.media, call.processor)
    assert not {"prompt_media", "processor"} & set(call.response)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    "media",
    [
        "text",
        {"offset": 1},
        [1],
        [{**MEDIA[0], "offset": "1"}],
        [{**MEDIA[0], "offset": -1}],
        [{**MEDIA[0], "length": 0}],
        [{**MEDIA[0], "length": 4}],
        [{**MEDIA[0], "grid": [2**70]}],
        [MEDIA[0], MEDIA[0]],
        [{"offset": 1, "length": 1}],
    ],
)
def test_pictures_that_cannot_be_read_leave_the_call_without_them_and_say_why(path: str, media) -> None:
    call = read(path, answer_of(path, is_streamed=False, prompt_media=media, processor=PROCESSOR))
    assert ((), "", pack_ids([3])) == (call.media, call.processor, call.response_ids)
    assert call.ids_missing.startswith("the backend's prompt_media")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(MEDIA[0])), inner, max_size=5),
        max_leaves=12,
    ),
    st.none() | st.integers() | st.text(max_size=5),
)
def test_no_value_in_the_place_of_pictures_makes_reading_raise(media, processor) -> None:
    call = read("/v1/responses", answer_of("/v1/responses", is_streamed=False, prompt_media=media, processor=processor))
    assert pack_ids([3]) == call.response_ids
    assert call == decode(encode(call), ModelCall)
