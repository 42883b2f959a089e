"""Extracts the proposed text from an answer of the optimiser's model: between the requested tags, or in a code fence.

Models mention the tags as well as use them, wrap the text in a fence inside the tags, and write prompts that contain
fences. So pairs of tags on separate lines have precedence, and fences are matched like brackets.
"""

import re
from collections.abc import Iterator

_OPEN, _CLOSE = "<new_text>", "</new_text>"
_INNER = rf"((?:(?!^[ \t]*{_OPEN}[ \t]*$).)*?)"  # anything but a line that opens another pair
_FLAGS = re.DOTALL | re.MULTILINE | re.IGNORECASE
_ON_LINES = re.compile(rf"^[ \t]*{_OPEN}[ \t]*\n{_INNER}\n?^[ \t]*{_CLOSE}[ \t]*$", _FLAGS)
_AT_EDGES = re.compile(rf"^[ \t]*{_OPEN}((?:(?!{_OPEN}).)*?){_CLOSE}[ \t.]*$", _FLAGS)
_ANYWHERE = re.compile(rf"{_OPEN}((?:(?!{_OPEN}).)*?){_CLOSE}", _FLAGS)

_MENTIONED = re.compile(r"[`'\"\s]*(?:and|to|or|tags?)?[\W_]*", re.IGNORECASE)
"""Matches the words between two tags that the model only mentions."""

_FENCE = re.compile(r"[ ]{0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)")


def extract(answer: str) -> str | None:
    """Return the proposed text: between the tags, or in the only fenced block; ``None`` if there is neither."""
    for pattern in (_ON_LINES, _AT_EDGES, _ANYWHERE):
        found = [text for text in pattern.findall(answer) if not _MENTIONED.fullmatch(text)]
        if found:
            # A model that corrects itself writes the final text last.
            return _unwrapped(re.sub(r"\A[ \t]*\n|\n[ \t]*\Z", "", found[-1]))
    rest = _ANYWHERE.sub("", answer)
    if _OPEN in rest.lower():  # the answer ended before the text did
        return None
    blocks = list(_blocks(rest))
    return "\n".join(blocks[0][1:-1]) if len(blocks) == 1 else None


def before_text(answer: str) -> str:
    """Return the part of an answer before the proposed text: the critique, if the answer contains one."""
    start = answer.lower().rfind(_OPEN)
    return answer[: start if start >= 0 else answer.find("```")].strip() if start >= 0 or "```" in answer else ""


def _unwrapped(text: str) -> str:
    """Return the text without the fence, if one fence encloses all of it; other texts are unchanged."""
    lines = text.strip().splitlines()
    return "\n".join(lines[1:-1]) if list(_blocks(text.strip())) == [lines] else text


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield the lines of every outermost fenced block, fences included.

    A fence with a language opens a block, even inside another one. A fence without a language closes the innermost
    block if it is at least as long as that block's fence (CommonMark 0.31, section 4.5); outside of all blocks it opens
    one.
    """
    block: list[str] = []
    opened: list[str] = []
    for line in text.splitlines():
        if opened:
            block.append(line)
        fence = _FENCE.fullmatch(line)
        if fence is None:
            continue
        if opened and not fence[2] and fence[1].startswith(opened[-1]):
            opened.pop()
            if not opened:
                yield block
        elif not opened or fence[2]:
            if not opened:
                block = [line]
            opened.append(fence[1])
