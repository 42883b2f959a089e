"""The token codec is reversible, and has no drift over a conversation."""

from hypothesis import given
from hypothesis import strategies as st

from agl_testing.model_server.codec import (
    ConversationTurn,
    FunctionCall,
    decode,
    encode,
    logprob,
    render_answer,
    render_prompt,
)

TEXTS = st.text(max_size=20)
CALLS = st.lists(st.builds(FunctionCall, TEXTS, TEXTS), max_size=2).map(tuple)
TURNS = st.lists(st.builds(ConversationTurn, role=st.sampled_from(["system", "user", "tool"]), text=TEXTS), max_size=4)


@given(TEXTS)
def test_decode_undoes_encode(text: str) -> None:
    assert text == decode(encode(text))


@given(TURNS, TEXTS, CALLS, TURNS)
def test_next_prompt_starts_with_previous_prompt_and_response(
    turns: list[ConversationTurn], text: str, calls: tuple[FunctionCall, ...], more: list[ConversationTurn]
) -> None:
    prompt = render_prompt(turns, tools=[{"name": "t"}])
    response = render_answer(text, calls)
    said = ConversationTurn(role="assistant", text=text, calls=calls)
    following = render_prompt([*turns, said, *more], tools=[{"name": "t"}])
    assert prompt + response == following[: len(prompt) + len(response)]


@given(st.integers(0, 287), st.integers(0, 100_000))
def test_logprob_is_negative_and_above_minus_one(token: int, position: int) -> None:
    assert -1 < logprob(token, position) < 0
