"""Filled templates: recognises a prompt in a recorded message, and extracts the values of its placeholders.

The literal parts are looked for in order, each after the end of the one before. The time is linear in the message,
however many placeholders there are. A regular expression with ``(.*?)`` for each placeholder finds the same, but takes
polynomial time if there is no match, and messages are written by agents and models.

If a message can be read in several ways, the match starts at the first occurrence of the first literal part, and each
placeholder gets as little text as possible: it ends at the next occurrence of the literal part after it, and is empty
if another placeholder follows directly. A placeholder at the end of the template gets the rest of the message.
"""

import re
import string
from collections.abc import Callable
from typing import NamedTuple

from agl.schemas import PromptTemplate, Record, Resource
from agl_algo_apo.texts.messages import messages_of


class Filled(NamedTuple):
    """One occurrence of a template in a text: start, end, and the value of each placeholder by name."""

    start: int
    end: int
    values: dict[str, str]


class FilledTemplate(Record, frozen=True, kw_only=True):
    """Finds a template in texts in which its placeholders are filled.

    Attributes:
        literals: The literal parts, one more than there are placeholders; some may be empty.
        names: The placeholders between the literal parts; ``""`` for one whose value is not in :class:`Filled`.
    """

    literals: tuple[str, ...]
    names: tuple[str, ...] = ()

    def search(self, text: str, start: int = 0) -> Filled | None:
        """Return the first occurrence of the template in ``text`` at or after ``start``; ``None`` without one."""
        first = text.find(self.literals[0], start)
        if first < 0:
            return None
        end, values = first + len(self.literals[0]), dict[str, str]()
        for number, name in enumerate(self.names, start=1):
            literal = self.literals[number]
            takes_rest = number == len(self.names) and not literal
            next_at = len(text) if takes_rest else text.find(literal, end)
            # The earliest occurrence leaves the most text for the later parts, so no later one could match more.
            if next_at < 0:
                return None
            if name:
                values[name] = text[end:next_at]
            end = next_at + len(literal)
        return Filled(first, end, values)

    def replace(self, text: str, new: Callable[[Filled], str]) -> str:
        """Return the text with every occurrence of the template replaced by ``new(occurrence)``."""
        parts: list[str] = []
        done = 0
        while (found := self.search(text, done)) is not None:
            parts += [text[done : found.start], new(found)]
            done = found.end
            if done == len(text):  # a template of placeholders alone would be found in the empty rest once more
                break
        return "".join([*parts, text[done:]])


def filled_template(resource: Resource) -> FilledTemplate | None:
    """Return a matcher for a prompt; ``None`` if the resource is not a template or is empty.

    For jinja and plain text the matcher uses only the longest literal line, and for several messages only the first
    message. A placeholder that is used again has the value of its first use; one that is not a plain name, such as
    ``{a.b}``, has no value.
    """
    if messages := messages_of(resource):
        return filled_template(PromptTemplate(template=messages[0][1]))
    if not isinstance(resource, PromptTemplate) or not resource.template.strip():
        return None
    if resource.engine != "f-string":
        literal = max(re.split(r"\{\{.*?\}\}|\{%.*?%\}|\n", resource.template), key=len).strip()
        return FilledTemplate(literals=(literal,)) if literal else None
    literals, names = [""], list[str]()
    for literal, field, _, _ in string.Formatter().parse(resource.template):
        literals[-1] += literal  # an escaped brace ends a part, and the next one follows without a placeholder
        if field is not None:
            literals.append("")
            names.append(field if field.isidentifier() and field not in names else "")
    return FilledTemplate(literals=tuple(literals), names=tuple(names))
