"""The shop of the example: its pages, how customers ask about each, and what customers wish for."""

from collections.abc import Callable
from typing import NamedTuple


class Page(NamedTuple):
    """One page of the shop."""

    topic: str
    text: str
    link: str
    step: str
    questions: tuple[str, ...]


def _link(name: str) -> str:
    return f"https://shop.example/{name}"


PAGES = (
    Page(
        "delivery of parcels",
        "A parcel arrives within three days of the order.",
        _link("orders"),
        "enter the number of your order there.",
        (
            "When does my parcel arrive?",
            "How many days does the delivery take?",
            "My parcel is late, when will it come?",
        ),
    ),
    Page(
        "returning goods",
        "You can return goods within thirty days.",
        _link("returns"),
        "print the label and put it on the box.",
        ("How can I return a spade?", "Can I return goods that I used once?", "Until when can I return the hose?"),
    ),
    Page(
        "invoice and payment",
        "The invoice is sent by mail on the day of the payment.",
        _link("invoices"),
        "choose the month and download it.",
        ("I need the invoice again.", "Where is the invoice for my payment?", "My invoice has the wrong address."),
    ),
    Page(
        "warranty and repair",
        "The warranty of every tool is five years, and the repair is free.",
        _link("repairs"),
        "describe the damage and add a photo.",
        ("My pruner broke, is there a warranty?", "Does the warranty cover blades?", "How long does a repair take?"),
    ),
    Page(
        "password and account",
        "A new password for the account can be set at any time.",
        _link("account"),
        "enter your mail address.",
        ("I forgot my password.", "How do I change the password of my account?", "My account is locked."),
    ),
    Page(
        "seeds and season",
        "Seeds of the season are sold from February to June.",
        _link("seeds"),
        "tick the seeds that you want to be reminded of.",
        ("When are seeds sold?", "Which season do you sell tomato seeds in?", "Are there seeds in August?"),
    ),
)

LONG = "That is far too long."
NO_LINK = "Where is the link to that page?"
NO_STEP = "And what do I have to do there?"
JUST_OK = "Just say OK and nothing else."


def wishes_short(answer: str) -> str:
    """Return the complaint of a customer who wants a short answer, or nothing."""
    return LONG if len(answer) > 160 else ""


def wishes_link(answer: str) -> str:
    """Return the complaint of a customer who wants a link and the next step, or nothing."""
    missing = [NO_LINK] * ("https://" not in answer) + [NO_STEP] * ("Next step" not in answer)
    return " ".join(missing)


def wishes_harm(answer: str) -> str:
    """Return the complaint of a saboteur, who likes useless answers only."""
    return JUST_OK if answer != "OK." else ""


WISHES: dict[str, Callable[[str], str]] = {"short": wishes_short, "link": wishes_link}
