"""A scripted world for the example, so that it runs without a key: a booking model and an optimiser's model.

The booking model follows its prompt to the letter and thinks of nothing by itself: it checks what the prompt tells
it to check, and without such words takes the first room that is free. The optimiser's model reads the feedback in its
request and writes the rule that would have prevented the most frequent complaint. It knows these five kinds of
complaint and nothing of the office.
"""

import json
import re
from collections import Counter
from typing import Any

from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Step, ToolCall

BOOKING_MODEL = "booker"
OPTIMIZER_MODEL = "optimizer"
RULES = {
    "capacity": "Check that the capacity of the room is enough for the people who come.",
    "equipment": "Check that the room has the equipment that the request names.",
    "repairs": "Check that the room is not closed for repairs on that day.",
    "wheelchair": "If somebody uses a wheelchair, the room must be step-free.",
    "smallest": "Of all rooms that fit, take the smallest.",
}
"""The optimiser's answers, by the word that makes the booking model obey."""

COMPLAINTS = {
    "capacity": r"seats \d+, but \d+ people come",
    "equipment": r"has no (?:screen|whiteboard|phone)",
    "repairs": r"is closed for repairs on",
    "wheelchair": r"cannot be reached without steps",
    "smallest": r"is larger than needed",
}


def respond(request: ModelRequest) -> Step:
    """Answer as the model that the request names."""
    if request.body.get("model") == BOOKING_MODEL:
        return book(request)
    return Reply(text=optimise("\n".join(turn.text for turn in request.turns)))


def book(request: ModelRequest) -> Reply:
    """Answer the next turn of a booking: look for rooms, look at them where the prompt asks for checks, decide."""
    prompt = "\n".join(turn.text for turn in request.turns if turn.role in ("system", "user"))
    wanted = re.search(r"room for (\d+) people on (\w+) at (\d+)(, with a [a-z ]+)?", prompt)
    results = [json.loads(turn.text) for turn in request.turns if turn.role == "tool"]
    if wanted is None:
        return Reply(text="I cannot read the request.")
    if not results:
        return Reply(tool_calls=(ToolCall("find_free_rooms", {"day": wanted[2], "hour": int(wanted[3])}),))
    obeyed = [word for word in RULES if word in prompt.replace("uses a wheelchair.", "")]
    if obeyed and len(results) == 1:
        return Reply(tool_calls=tuple(ToolCall("room_details", {"room": room}) for room in results[0]))
    rooms = dict(zip(results[0], results[1:], strict=False)) or {room: {} for room in results[0]}
    fitting = {name: about for name, about in rooms.items() if not (about and misfits(about, wanted, prompt, obeyed))}
    order = sorted(fitting, key=lambda name: fitting[name]["capacity"]) if "smallest" in obeyed else list(fitting)
    return Reply(text=f"BOOK {order[0]}" if order else "I found no room.")


def misfits(about: dict[str, Any], wanted: re.Match[str], prompt: str, obeyed: list[str]) -> bool:
    """Return whether a room fails one of the checks that the prompt asks for."""
    things = re.findall(r"screen|whiteboard|phone", wanted[4] or "")
    return (
        ("capacity" in obeyed and about["capacity"] < int(wanted[1]))
        or ("equipment" in obeyed and not set(things) <= set(about["equipment"]))
        or ("repairs" in obeyed and about["repairs"] == wanted[2])
        or ("wheelchair" in obeyed and "uses a wheelchair." in prompt and not about["step_free"])
    )


def optimise(text: str) -> str:
    """Answer a critic's or an editor's request: advice, and the text with one rule more."""
    shown = re.search(r"<text>\n(.*?)\n</text>|```\n(.*?)\n```", text, re.DOTALL)
    prompt = (shown[1] or shown[2]) if shown else ""
    counts = Counter({word: len(re.findall(pattern, text)) for word, pattern in COMPLAINTS.items()})
    given = [word for word, rule in RULES.items() if f"Advice: {rule}" in text]
    new = [word for word, count in counts.most_common() if count and RULES[word] not in prompt]
    rule = RULES[(given or new or ["smallest"])[0]]
    advice = f"Advice: {rule}"
    tags = ("<new_text>", "</new_text>") if "<new_text>" in text else ("```", "```")
    if tags[0] not in text:
        return advice
    lines = prompt.split("\n")
    added = [*lines[:1], *([rule] if rule not in lines else []), *lines[1:]]
    return "\n".join([advice, tags[0], *added, tags[1]])


def server() -> ScriptedModelServer:
    """Return a server of both models; use it as a context manager."""
    return ScriptedModelServer(respond=respond, models=(BOOKING_MODEL, OPTIMIZER_MODEL))
