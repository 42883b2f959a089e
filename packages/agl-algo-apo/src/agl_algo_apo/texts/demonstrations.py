"""Demonstrations: recorded inputs with good outputs, shown in a prompt together with its instructions.

The choice of demonstrations follows Opsahl-Ong et al. 2024, "Optimizing Instructions and Demonstrations for Multi-Stage
Language Model Programs" (MIPROv2, arXiv 2406.11695), section 4. They are rendered in one form, before the line with the
template's first placeholder, or at the end if it has none:

    Examples of good answers:

    Input: Order train-003. Fields: date, amount.
    Output: {"date": "2026-11-22", "amount": "3.50 EUR"}

A prompt of several messages shows each demonstration as a pair of messages instead, the user's input and the
assistant's output, before its last user message, or at the end if it has none. If that message has exactly one
placeholder, the input takes the placeholder's position in a copy of that message, as in the real question.

An input or output of several lines starts on a separate line. The text is escaped for the template's engine, so that
filling the placeholders leaves it as it was recorded. The instructions are stored without demonstrations: the
optimiser's model neither sees nor changes demonstrations, and a separate rule applies to them
(`acceptance/static_checks.py`).
"""

import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from agl.schemas import Json, PromptTemplate, Record, Resource
from agl_algo_apo.texts.messages import MARK, Message, document_of, messages_of, read_document

HEADING = "Examples of good answers:"
"""The first line of the demonstrations in a prompt."""


class Demonstration(Record, frozen=True, kw_only=True):
    """One recorded run of a training task, as a prompt shows it.

    Attributes:
        input: The values that filled the prompt's placeholders, or the task without its hidden keys.
        output: The answer.
        rollout: Id of the rollout in which it was recorded.
        task: Position of the training task.
    """

    input: str
    output: str
    rollout: str
    task: int

    @property
    def key(self) -> str:
        """The name by which a demonstration is removed from a prompt."""
        return f"the demonstration from {self.rollout}"

    @property
    def text(self) -> str:
        """Input and output as a prompt shows them, before escaping."""
        return f"{_labelled('Input', self.input)}\n{_labelled('Output', self.output)}"


Demonstrations = Mapping[str, tuple[Demonstration, ...]]
"""Demonstrations by resource name; a resource without demonstrations is absent."""


def demonstrated(instructions: str, shown: Sequence[Demonstration], *, like: Resource) -> str:
    """Return the instructions with the demonstrations inserted.

    ``like`` is a template, whose engine decides the escaping, or a prompt of several messages. Messages that cannot be
    parsed are returned unchanged, because the static checks refuse them.
    """
    if shown and messages_of(like):
        return _with_turns(instructions, shown)
    if not shown or not isinstance(like, PromptTemplate):
        return instructions
    block = "\n\n".join([HEADING, *(demonstration.text for demonstration in shown)])
    block = _escaped(block, like.engine)
    place = _first_placeholder(instructions, like.engine)
    if place is None:
        return f"{instructions.rstrip()}\n\n{block}\n"
    start = instructions.rfind("\n", 0, place) + 1
    before = f"{instructions[:start].rstrip()}\n\n" if start else ""
    return f"{before}{block}\n\n{instructions[start:]}"


def is_escapable(demonstration: Demonstration, *, like: Resource) -> bool:
    """Return true if a prompt like ``like`` can show the demonstration without taking it for its own syntax."""
    if messages_of(like):
        return MARK not in demonstration.text
    return isinstance(like, PromptTemplate) and not (like.engine == "jinja" and "endraw" in demonstration.text)


def without_demonstrations(shown: Demonstrations, keys: Mapping[str, Collection[str]]) -> Demonstrations:
    """Return the demonstrations without those whose keys are in ``keys``; both are by resource name."""
    kept = {name: tuple(d for d in found if d.key not in keys.get(name, ())) for name, found in shown.items()}
    return {name: found for name, found in kept.items() if found}


def as_text(value: Json) -> str:
    """Return a value as a demonstration shows it: a string unchanged, other values as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _with_turns(instructions: str, shown: Sequence[Demonstration]) -> str:
    """Return a document of several messages with each demonstration inserted as a pair of messages."""
    try:
        messages = messages_of(read_document(instructions))
        place = max((i for i, (role, _) in enumerate(messages) if role == "user"), default=len(messages))
        question = messages[place][1] if place < len(messages) else ""
        turns = [turn for each in shown for turn in _turns(question, each)]
    except ValueError:
        return instructions
    return document_of([*messages[:place], *turns, *messages[place:]]) if messages else instructions


def _turns(question: str, shown: Demonstration) -> tuple[Message, Message]:
    asked, fields = _escaped(shown.input, "f-string"), PromptTemplate(template=question).fields
    place = "{" + "".join(fields) + "}"
    if len(fields) == 1 and question.count(place) == 1:
        asked = question.replace(place, asked)
    return ("user", asked), ("assistant", _escaped(shown.output, "f-string"))


def _labelled(label: str, text: str) -> str:
    return f"{label}:\n{text}" if "\n" in text else f"{label}: {text}"


def _escaped(text: str, engine: str) -> str:
    if engine == "jinja":
        return f"{{% raw %}}{text}{{% endraw %}}"
    return text.replace("{", "{{").replace("}", "}}") if engine == "f-string" else text


def _first_placeholder(text: str, engine: str) -> int | None:
    """Return the position of a template's first placeholder or statement; ``None`` if it has neither."""
    if engine == "plain":
        return None
    pattern = r"\{\{|\{%" if engine == "jinja" else r"\{\{|\}\}|\{"
    braces = [match for match in re.finditer(pattern, text) if engine == "jinja" or match[0] == "{"]
    return braces[0].start() if braces else None
