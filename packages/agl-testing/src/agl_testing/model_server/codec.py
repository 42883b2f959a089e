"""The scripted server's token codec, with one token per byte, and marker tokens around turns.

It is not the tokenizer of a real model. It has three properties that tests and benchmarks need: ids are known in
advance, decoding gives exactly the encoded text, and there is no drift: the prompt of a conversation's next call starts
with the ids of the previous prompt and response.
"""

from collections.abc import Iterable, Sequence

import msgspec

OFFSET = 32
"""The id of byte ``b`` is ``b + OFFSET``; smaller ids are markers."""

END = 1
TOOLS = 2
CALL = 3
ARGUMENTS = 4
IMAGE = 5
ROLES = {"system": 16, "developer": 17, "user": 18, "assistant": 19, "tool": 20}
_NAMES = {"end": END, "tools": TOOLS, "call": CALL, "arguments": ARGUMENTS, "image": IMAGE, **ROLES}
_MARKERS = {number: f"<|{name}|>" for name, number in _NAMES.items()}

VOCABULARY_SIZE = OFFSET + 256


class FunctionCall(msgspec.Struct, frozen=True):
    """A function call of the model, with its arguments as the JSON text that the model wrote.

    ``namespace`` is the function's group in the responses API; it is not part of the tokens.
    """

    name: str
    arguments: str
    namespace: str = ""


class ConversationTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation in any dialect; ``images`` is the number of its image parts."""

    role: str
    text: str = ""
    calls: tuple[FunctionCall, ...] = ()
    images: int = 0


def encode(text: str) -> list[int]:
    """Return the token ids of ``text``, one per UTF-8 byte."""
    return [byte + OFFSET for byte in text.encode()]


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids, with markers as ``<|name|>``; without markers, the inverse of :func:`encode`."""
    out = bytearray()
    for number in ids:
        out += bytes((number - OFFSET,)) if number >= OFFSET else _MARKERS[number].encode()
    return out.decode(errors="replace")


def render_turn(turn: ConversationTurn) -> list[int]:
    """Return the token ids of one message: role marker, images, text, calls and end marker."""
    return [ROLES.get(turn.role, ROLES["user"]), *render_answer(turn.text, turn.calls, images=turn.images), END]


def render_answer(text: str, calls: Sequence[FunctionCall], *, images: int = 0) -> list[int]:
    """Return the token ids of a message's content, without role marker and end marker."""
    ids = [IMAGE] * images + encode(text)
    for call in calls:
        ids += render_call_head(call.name) + encode(call.arguments)
    return ids


def render_call_head(name: str) -> list[int]:
    """Return the token ids of a call up to its arguments: call marker, function name, and arguments marker."""
    return [CALL, *encode(name), ARGUMENTS]


def render_prompt(turns: Iterable[ConversationTurn], *, tools: object = None) -> list[int]:
    """Return the token ids of a chat request's prompt: tools, turns, and the role marker that starts the answer."""
    ids = [TOOLS, *encode(msgspec.json.encode(tools).decode()), END] if tools else []
    for turn in turns:
        ids += render_turn(turn)
    return [*ids, ROLES["assistant"]]


def logprob(token: int, position: int) -> float:
    """Return the log-probability, below 0, that the server reports for ``token`` at ``position`` of a response."""
    return -((token * 31 + position * 17) % 97 + 1) / 100
