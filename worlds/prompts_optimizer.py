"""A scripted critic and editor for :mod:`worlds.prompts`: an optimiser's model behind an OpenAI endpoint.

They know only the text of their request, as a language model would:

- *Complaints*, sentences such as ``[clerk] date: expected EUR, found plain.``, wherever they stand. The critic picks
  one that is about the role of the prompt, the more frequent the likelier, and advises the line that answers it. With
  probability ``1 - skill`` it misreads it and advises something else about that role.
- *Advice*, sentences such as ``Advice: Write the date as EUR.``, which an earlier call of the critic gave.
- *The prompt*: the first block between ``` fences or between a tag and its end (``<prompt>..</prompt>``) that holds
  the sentence ``You are the <role>.`` and a placeholder; where none has a placeholder, the first with the sentence.

- *Runs*, blocks with an order (``"order":"train-003"``) and the complaints about it. One that memorises advises notes
  about each complaint of one run instead, ``Advice: For order train-003 write the date as EUR.``

The editor takes the advice that the request holds, or else what it would advise itself, and answers with the advice
and the new prompt: between the tags that the request asks for (``between <new> and </new>``), else between ``` fences.
Without complaints it guesses. Told to ``remove the one`` line it removes any, told to write one ``merged text`` it
joins the lines of the first two prompts. A model whose name contains ``critic`` gives the advice alone. So one
endpoint serves optimisers with one call per proposal and with two.

The same request gets the same answer, whenever it comes: to get another, send another ``seed`` in the request's body.
"""

import hashlib
import random
import re
import threading
from typing import Any, Literal

from agl.schemas import to_json
from agl_testing.model_server import Garbage, ModelRequest, Reply, Status, Step
from worlds.prompts import LINE, NOTE, STYLES, VOCABULARY, line_of, note_of

Mode = Literal["honest", "dead", "corrupt", "garbage", "silent", "broken"]
"""``dead`` answers 503, ``corrupt`` sends what no API sends, ``garbage`` talks about something else, ``silent`` says
nothing, ``broken`` loses the prompt's placeholder or invents another."""

__all__ = [
    "Mode",
    "ScriptedOptimizer",
    "edit",
    "find_prompts",
]

COMPLAINT = re.compile(r"\[([a-z]+)\] ([a-z ]+): expected ([A-Za-z0-9 ]+), found ([A-Za-z0-9 ]+)\.")
ADVICE = re.compile(rf"Advice: ({LINE.pattern}|{NOTE.pattern})")
ORDER = re.compile(r"\border\W{1,5}([a-z]+-[0-9]+)")
_FENCED = re.compile(r"```[a-z]*\n(.*?)\n?```", re.DOTALL)
_TAGGED = re.compile(r"<([A-Za-z_]+)[^<>]*>\s*([^<]*?)\s*</\1>")
_ROLE = re.compile(r"You are the ([a-z]+)\.")
_WANTED = re.compile(r"between <([A-Za-z_]+)> and </\1>")
_PLACE = re.compile(r"\{+ ?[a-z_]+ ?\}+")


class ScriptedOptimizer:
    """Answers critics' and editors' requests; pass :meth:`respond` to a scripted model server.

    Args:
        skill: Probability that the critic reads a complaint right.
        memorises: Probability that the critic notes the answers of one order instead of advising a rule.
        mode: The way in which it misbehaves; may be changed while it serves.
        after: Number of calls that it answers honestly before it misbehaves.
        delay_s: Seconds that each answer takes.
        seed: Seed of everything that it draws.
    """

    def __init__(
        self,
        *,
        skill: float = 0.75,
        memorises: float = 0.0,
        mode: Mode = "honest",
        after: int = 0,
        delay_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.mode: Mode = mode
        self.calls = 0
        self._skill = skill
        self._memorises = memorises
        self._after = after
        self._delay_s = delay_s
        self._seed = seed
        self._lock = threading.Lock()

    def respond(self, request: ModelRequest) -> Step:
        """Return the answer to one request."""
        with self._lock:
            self.calls += 1
            is_honest = self.mode == "honest" or self.calls <= self._after
        if not is_honest and self.mode == "dead":
            return Status(code=503)
        if not is_honest and self.mode == "corrupt":
            return Garbage()
        text = "\n\n".join(turn.text for turn in request.turns)
        model = str(request.body.get("model", ""))
        said = self.answer(text, model=model, seed=request.body.get("seed"))
        return Reply(text=said if is_honest else self._spoil(said), delay=self._delay_s)

    def answer(self, text: str, *, model: str = "editor", seed: Any = None) -> str:
        """The answer to a request's text; pure."""
        draw = random.Random(hashlib.sha256(to_json([self._seed, seed, text])).hexdigest())
        prompts = find_prompts(text) or [""]
        if "remove the one" in text.lower():
            return _presented(_shortened(prompts[0], draw), text)
        if "merged text" in text and len(prompts) > 1:
            return _presented(merge(prompts[0], prompts[1]), text)
        given = [match[0] for match in ADVICE.findall(text)]
        advice = given or self._memorised(text, prompts[0], draw) or [self._advise(text, prompts[0], draw)]
        said = "\n".join(f"Advice: {line}" for line in advice)
        if "critic" in model:
            return said
        prompt = prompts[0]
        for line in advice if NOTE.search(advice[-1]) else advice[-1:]:
            prompt = edit(prompt, line)
        return f"{said}\n\n{_presented(prompt, text)}"

    def _memorised(self, text: str, prompt: str, draw: random.Random) -> list[str]:
        """Return notes about the complaints of one order, none unless it memorises this time."""
        if not self._memorises or draw.random() >= self._memorises:  # nothing is drawn where it never does
            return []
        role = _ROLE.search(prompt)
        pieces = ORDER.split(text)[1:]  # order, what follows it, the next order, and so on
        runs: dict[str, list[str]] = {}
        for order, rest in zip(pieces[::2], pieces[1::2], strict=True):
            runs.setdefault(order, []).extend(
                note_of(order, field, style)
                for about, field, style, _ in COMPLAINT.findall(rest)
                if role is None or about == role[1]
            )
        found = [list(dict.fromkeys(notes)) for notes in runs.values() if notes]
        return draw.choice(found) if found else []

    def _advise(self, text: str, prompt: str, draw: random.Random) -> str:
        role = _ROLE.search(prompt)
        held = set(LINE.findall(prompt))
        complaints = [
            (field, style)
            for about, field, style, _ in COMPLAINT.findall(text)
            if role is None or about == role[1]
            if (field, style) not in held
        ]
        if not complaints:
            return line_of(draw.choice(VOCABULARY), draw.choice(STYLES))
        field, style = draw.choice(complaints)
        if draw.random() < self._skill:
            return line_of(field, style)
        return line_of(*draw.choice([(field, draw.choice(STYLES)), (draw.choice(VOCABULARY), style)]))

    def _spoil(self, said: str) -> str:
        if self.mode == "broken":
            return _PLACE.sub("{customer}" if len(said) % 2 else "", said)
        return "" if self.mode == "silent" else "The weather is fine today, and I have nothing to add."


def find_prompts(text: str) -> list[str]:
    """Return the prompts in a request in their order, those with a placeholder first."""
    blocks = [(match.start(), match[1]) for match in _FENCED.finditer(text)]
    blocks += [(match.start(), match[2]) for match in _TAGGED.finditer(text)]
    prompts = [body for _, body in sorted(blocks) if _ROLE.search(body)]
    return sorted(prompts, key=lambda body: _PLACE.search(body) is None)


def edit(prompt: str, line: str) -> str:
    """Return the prompt with a line added; older lines about the same field are taken out."""
    note = NOTE.search(line)
    field = "" if note else LINE.findall(line)[0][0]
    kept = [old for old in prompt.split("\n") if old != line and (note or field not in dict(LINE.findall(old)))]
    places = [index for index, old in enumerate(kept) if _PLACE.search(old)]
    where = places[-1] if places else len(kept)
    return "\n".join([*kept[:where], line, *kept[where:]])


def merge(prompt: str, other: str) -> str:
    """Return the prompt with the field lines of another added; where both have one about a field, the other's stays."""
    for pattern in (LINE, NOTE):
        for match in pattern.finditer(other):
            prompt = edit(prompt, match[0])
    return prompt


def _shortened(prompt: str, draw: random.Random) -> str:
    lines = prompt.split("\n")
    removable = [line for line in lines if LINE.search(line) or NOTE.search(line)]
    if removable:
        lines.remove(draw.choice(removable))
    return "\n".join(lines)


def _presented(prompt: str, request: str) -> str:
    wanted = _WANTED.search(request)
    return f"<{wanted[1]}>\n{prompt}\n</{wanted[1]}>" if wanted else f"```\n{prompt}\n```"
