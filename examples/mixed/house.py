"""The shop of the example: what an order form has to say, and how the shop wants each entry written."""

import re
from collections.abc import Mapping

FIELDS = ("name", "city", "item", "quantity", "amount", "date")
"""The entries of a form, in order."""

PLAIN = "plain"
HOUSE = {"name": "upper case", "quantity": "full words", "amount": "EUR", "date": "ISO 8601"}
"""The style that the shop wants by entry; the others stay as they are in the letter. Nobody wrote it down."""

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
STYLES = (PLAIN, "ISO 8601", "EUR", "upper case", "digits only", "full words")
"""Styles that :func:`styled` knows."""


def styled(text: str, style: str) -> str:
    """A text in one of :data:`STYLES`; where the style makes no sense for it, the text as it is."""
    if style == "upper case":
        return text.upper()
    if style == "digits only":
        return re.sub(r"\D", "", text) or text
    if style == "full words":
        return NUMBERS[int(text)] if text.isdecimal() and int(text) < len(NUMBERS) else text
    if style == "EUR":
        return f"{text} EUR"
    return _iso(text) if style == "ISO 8601" else text


def _iso(text: str) -> str:
    found = re.fullmatch(r"(\d{1,2}) (\w+) (\d{4})", text)
    if found is None or found[2] not in MONTHS:
        return text
    return f"{found[3]}-{MONTHS.index(found[2]) + 1:02}-{int(found[1]):02}"


def wanted(field: str, fact: str) -> str:
    """The form's correct entry for the letter's `fact`."""
    return styled(fact, HOUSE.get(field, PLAIN))


def write_form(entries: Mapping[str, str]) -> str:
    """Entries as text, one line each."""
    return "\n".join(f"{field}: {text}" for field, text in entries.items())


def read_form(text: str) -> dict[str, str]:
    """The entries of a draft or a form; of two with one name the later one counts, other lines are left out."""
    return {field: said.strip() for field, said in re.findall(r"^(\w+):(.*)$", text, re.MULTILINE) if field in FIELDS}
