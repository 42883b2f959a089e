"""Compares texts by their words."""

import re

_WORD = re.compile(r"\w+")
_SHORT_FORMS = ((r"\b(can|won)'t\b", r"\1 not"), (r"n't\b", " not"), (r"'s\b", " is"), (r"'m\b", " am"))
_COMMON = frozenset(
    _WORD.findall(
        "a an and are at be can could do does for from how i in is it me my not of on or please so tell that the there "
        "this to was we what when where which who why will with would you your"
    )
)
_LONGEST = 4_000
"""How much of a text is read, in characters."""

_STEM = 5
"""How many letters of a word are compared, so that ``refund`` and ``refunds`` or ``refunded`` are alike."""


def normalised(text: str) -> str:
    """Return the words of a text in lower case, with spaces between them and short forms written out."""
    text = text[:_LONGEST].casefold().replace("\u2019", "'")
    for form, whole in _SHORT_FORMS:
        text = re.sub(form, whole, text)
    return " ".join(_WORD.findall(text))


def is_same_question(first: str, second: str) -> bool:
    """Return true if two texts ask the same, perhaps in other words: at least half of their telling words agree.

    Telling words are those that are not as common as ``the``; they are compared by their first letters. Texts with
    different numbers, such as those of two orders, ask different things.
    """
    one, other = normalised(first).split(), normalised(second).split()
    if one == other:
        return bool(one)
    numbers, others = _numbers(one), _numbers(other)
    if numbers and others and numbers != others:
        return False
    mine, theirs = _telling(one), _telling(other)
    shared = len(mine & theirs)
    return shared > 0 and 2 * shared >= len(mine | theirs)


def has_phrase(text: str, phrases: tuple[str, ...]) -> bool:
    """Return true if a text contains one of the phrases as whole words."""
    padded = f" {normalised(text)} "
    return any(f" {normalised(phrase)} " in padded for phrase in phrases if normalised(phrase))


def _telling(words: list[str]) -> set[str]:
    return {word[:_STEM] for word in words if word not in _COMMON}


def _numbers(words: list[str]) -> set[str]:
    return {word for word in words if any(map(str.isdigit, word))}
