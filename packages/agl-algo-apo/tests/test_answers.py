"""Read the proposed text from an answer, however the model presents it."""

import pytest

from agl_algo_apo.proposals.answers import extract

PROMPT = "Use the tool:\n```python\nsearch(x)\n```\nThen stop."


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Sure!\n<new_text>\nBe brief.\n</new_text>\nDone.", "Be brief."),
        ("<NEW_TEXT>Be brief.</NEW_TEXT>", "Be brief."),
        ("Here it is: <new_text>Be brief.</new_text> Done.", "Be brief."),
        ("between <new_text> and </new_text>:\n<new_text>\nA\n\n B\n</new_text>", "A\n\n B"),
        ("<new_text>\nA\n</new_text>\nNo, better:\n<new_text>\nB\n</new_text>", "B"),
        ("Here:\n```text\nBe brief.\n```", "Be brief."),
        ("Be brief.", None),
        ("", None),
        ("<new_text>Be bri", None),
        ("```\nA\n```\nor\n```\nB\n```", None),
    ],
)
def test_text_is_taken_or_nothing(answer: str, text: str | None) -> None:
    assert text == extract(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "<new_text>\nBe brief.\n</new_text>\nI put it between <new_text> and </new_text>.",
        "<new_text>\nBe brief.\n</new_text>\nI put it between `<new_text>` and `</new_text>`, as asked.",
        "<new_text>Be brief.</new_text>\n<new_text> and </new_text> are the tags.",
        "I use the <new_text> tag:\n<new_text>\nBe brief.\n</new_text>",
        "<new_text>\nBe brief.\n</new_text>\nThe form was:\n<new_text>\n...\n</new_text>",
        "Between <new_text> and </new_text>:\n```\nBe brief.\n```",
    ],
)
def test_tags_that_are_only_mentioned_do_not_win(answer: str) -> None:
    assert "Be brief." == extract(answer)


def test_mention_before_an_answer_that_was_cut_off_is_no_text() -> None:
    assert extract("Between <new_text> and </new_text>:\n<new_text>\nBe bri") is None


def test_tags_that_the_text_itself_mentions_stay() -> None:
    text = "Write between <new_text> and </new_text>.\nBe brief."
    assert text == extract(f"<new_text>\n{text}\n</new_text>")


@pytest.mark.parametrize("fence", ["```", "```text", "~~~", "````"])
def test_fence_around_the_whole_text_is_stripped(fence: str) -> None:
    end = fence.removesuffix("text")
    assert "Be brief.\nEnd." == extract(f"<new_text>\n{fence}\nBe brief.\nEnd.\n{end}\n</new_text>")
    assert PROMPT == extract(f"<new_text>\n{fence}\n{PROMPT}\n{end}\n</new_text>")


@pytest.mark.parametrize("text", [PROMPT, "```json\n{}\n```\nor\n```json\n[]\n```", "Answer as:\n```\nX\n```"])
def test_fence_that_is_part_of_the_text_stays(text: str) -> None:
    assert text == extract(f"<new_text>\n{text}\n</new_text>")


def test_inner_fence_does_not_cut_the_text() -> None:
    assert PROMPT == extract(f"Here:\n```\n{PROMPT}\n```\nDone.")
    assert PROMPT == extract(f"Here:\n````markdown\n{PROMPT}\n````\nDone.")
