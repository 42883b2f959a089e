"""A small world for prompt optimisers: no real model, and the expected score of every prompt is known exactly.

A clerk completes order forms. An order names the fields to fill in, and each field has to be written in a certain
style: *date as ISO 8601*, *amount as EUR*. The task model knows none of that. It obeys the lines of its prompt that
say ``Write the <field> as <style>.`` (of two lines about one field the later one), writes every other field plainly,
and slips now and then. So a prompt is as good as the lines that it holds, whatever stands around them.

- *Rules* are the (field, style) pairs that orders ask for; *free* fields are right when they are written plainly.
- *Distractors* are all other lines: about fields that no order has, or styles that are not asked for.
- The *trap* is the line ``Write the answer as brief.`` Many answers are criticised for being wordy and the line ends
  that, but a brief clerk leaves fields out, so the score falls.
- *Noise*: with probability ``noise`` a field is written in a random style.
- *Sparse*: a task scores 1 if all its fields are right, else 0; otherwise it scores the share that is right.
- *Notes* about one order, ``For order train-003 write the date as EUR.``, are obeyed in that order and before any rule.
  They pay on the task that they name and nowhere else: ``memorising`` has an optimiser that writes them.
- *Local* fields are in training orders only. Rules about them pay there, and are clutter everywhere else.
- *Unsaid* rules are named by no feedback, so no critic can advise them. The task model gets them right now and then,
  and always where its prompt shows an answer that does: ``Output:`` and the answer as JSON, after any input. Other
  fields are written as in such an answer too, where no line says how.
- *Roles*: a rule belongs to one prompt, and the same line in another prompt does nothing.
- *Partners*: two rules that interact. The task model obeys a line about one of their fields only if its prompt holds a
  line about the other one too, so neither rule shows a gain alone.
- *Crowding*: every line makes the task model slip more often, so a line has to gain more than it distracts.

All randomness follows from seeds that are passed in, so equal seeds give equal runs whatever the concurrency.
:mod:`worlds.prompts_run` has the agent, the reward and the model server of this world, and
:mod:`worlds.prompts_optimizer` a critic and editor for it.
"""

import random
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import msgspec

from agl.schemas import Json, PromptTemplate

__all__ = [
    "LINE",
    "NOTE",
    "PLAIN",
    "STYLES",
    "TRAP",
    "VOCABULARY",
    "WORLDS",
    "PromptWorld",
    "StyleRule",
    "cluttered",
    "complete_order",
    "crowded",
    "demonstrable",
    "duo",
    "easy",
    "is_brief",
    "judge",
    "line_of",
    "memorising",
    "noisy",
    "note_of",
    "obeyed_styles",
    "order_text",
    "paired",
    "prompt_name",
    "sparse",
]

LINE = re.compile(r"Write the ([a-z ]+?) as ([A-Za-z0-9 ]+)\.")
"""A line that the task model obeys: (field, style)."""

NOTE = re.compile(r"For order ([a-z]+-[0-9]+) write the ([a-z ]+?) as ([A-Za-z0-9 ]+)\.")
"""A memorised answer that the task model obeys in one order: (order, field, style)."""

OUTPUT = re.compile(r"^Output: (.+)$", re.MULTILINE)
"""An answer that a prompt shows."""

SHOWN = re.compile(r'"([a-z ]+)": ?"([A-Za-z0-9 ]+)"')
"""A field in such an answer: (field, style)."""

FIELDS = re.compile(r"Order ([a-z0-9-]+)\. Fields: ([a-z, ]+)\.")
"""The part of a prompt with its order that names the order and the fields to fill in."""

PLAIN = "plain"
STYLES = (PLAIN, "ISO 8601", "EUR", "upper case", "digits only", "full words")
VOCABULARY = ("date", "amount", "name", "street", "phone", "quantity", "weather", "colour")
"""Fields that a guess may name; no order has the last two."""

TRAP = ("answer", "brief")
Engine = Literal["f-string", "jinja", "plain"]


class StyleRule(msgspec.Struct, frozen=True):
    """A style that orders ask for, and the role whose prompt has to say so."""

    field: str
    style: str
    role: str = "clerk"

    @property
    def line(self) -> str:
        """The sentence that makes the task model follow the rule."""
        return line_of(self.field, self.style)


class PromptWorld(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one world; make a variant with ``msgspec.structs.replace``.

    Attributes:
        rules: The rules, which an optimiser has to find out.
        free: Fields that need no rule; they belong to the first role.
        local: Rules about fields that only training orders have; they belong to the first role.
        unsaid: Fields whose rules no feedback names.
        knack: Probability that the task model writes an unsaid field right where its prompt does not say how.
        memorises: How often the optimiser of this world writes notes about single orders instead of a rule.
        partners: Pairs of fields whose lines are obeyed together or not at all.
        noise: Probability that a field is written in a random style.
        crowding: The part of that probability that each line of the prompt adds.
        harm: Probability that a clerk with the trap in the prompt leaves a field out.
        nagging: Share of the answers that are criticised for being wordy.
        fewest: Fields in an order at least; ``most`` at most.
        is_sparse: Whether only a complete answer scores.
        train_size: Number of training tasks; ``val_size`` of validation tasks.
        engine: Template engine of the seed prompts, which decides how they write their placeholder.
        seed: Seed of the tasks.
    """

    rules: tuple[StyleRule, ...]
    free: tuple[str, ...] = ("note", "city")
    local: tuple[StyleRule, ...] = ()
    unsaid: tuple[str, ...] = ()
    knack: float = 0.0
    memorises: float = 0.0
    partners: tuple[tuple[str, str], ...] = ()
    noise: float = 0.05
    crowding: float = 0.0
    harm: float = 0.4
    nagging: float = 0.2
    fewest: int = 2
    most: int = 4
    is_sparse: bool = False
    train_size: int = 40
    val_size: int = 32
    engine: Engine = "f-string"
    seed: int = 0

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles in order of their first rule; each has a prompt."""
        return tuple(dict.fromkeys(rule.role for rule in self.rules))

    @property
    def train(self) -> list[Json]:
        """Training tasks; ``expected`` is to be hidden from the agent."""
        return self._tasks("train", self.train_size)

    @property
    def val(self) -> list[Json]:
        """Validation tasks, none of which is a training task."""
        return self._tasks("val", self.val_size)

    def seeds(self) -> dict[str, PromptTemplate]:
        """The prompts to start from, by resource name: they hold no rule."""
        return {prompt_name(role): self._template(role, ()) for role in self.roles}

    def solution(self) -> dict[str, PromptTemplate]:
        """Prompts that hold every rule and nothing else, by resource name."""
        lines = {role: [rule.line for rule in self.rules if rule.role == role] for role in self.roles}
        return {prompt_name(role): self._template(role, lines[role]) for role in self.roles}

    def expected(self, prompts: Mapping[str, str], tasks: Sequence[Json] | None = None) -> float:
        """The exact mean score of prompts (texts by resource name) on ``tasks``, the validation tasks by default."""
        chosen = self.val if tasks is None else tasks
        return sum(self._expected_of(prompts, task) for task in chosen) / len(chosen)

    def gap_closed(self, prompts: Mapping[str, str]) -> float:
        """The part of the way that prompts have gone from the seeds (0.0) to the solution (1.0), by expected score."""
        low = self.expected({name: prompt.template for name, prompt in self.seeds().items()})
        high = self.expected({name: prompt.template for name, prompt in self.solution().items()})
        return (self.expected(prompts) - low) / (high - low)

    def heeded(self, styles: Mapping[str, str]) -> dict[str, str]:
        """Return the styles without those whose field has a partner that has none."""
        lone = {one for pair in self.partners for one in pair if not styles.keys() >= {*pair}}
        return {field: style for field, style in styles.items() if field not in lone}

    def slips(self, styles: Mapping[str, str]) -> float:
        """The probability that a field is written in a random style under a prompt that asks for these styles."""
        return min(1.0, self.noise + self.crowding * len(styles))

    def _expected_of(self, prompts: Mapping[str, str], task: Any) -> float:
        chances: list[float] = []
        for role, fields in task["fields"].items():
            asked = obeyed_styles(prompts[prompt_name(role)], order=task["order"])
            obeyed, noise = self.heeded(asked), self.slips(asked)
            kept = 1.0 - self.harm if is_brief(obeyed) else 1.0
            for field in fields:
                is_known = field in self.unsaid and field not in obeyed
                right = self.knack if is_known else obeyed.get(field, PLAIN) == task["expected"][field]
                # Right by following the prompt, or by a slip that happens to draw the right style.
                chances.append(kept * ((1.0 - noise) * right + noise / len(STYLES)))
        # Fields are independent: sparse needs all of them, otherwise the score is the share that is right.
        return prod(chances) if self.is_sparse else sum(chances) / len(chances)

    def _template(self, role: str, lines: Sequence[str]) -> PromptTemplate:
        place = {"f-string": "{order}", "jinja": "{{ order }}", "plain": ""}[self.engine]
        parts = [f"You are the {role}.", "Complete the order.", *lines, place]
        return PromptTemplate(template="\n".join(part for part in parts if part), engine=self.engine)

    def _tasks(self, split: str, count: int) -> list[Json]:
        return [self._task(split, number) for number in range(count)]

    def _task(self, split: str, number: int) -> Json:
        draw = random.Random(f"{self.seed}|{split}|{number}")
        local = self.local if split == "train" else ()
        others = (*self.free, *(rule.field for rule in local))
        owners = {**{rule.field: rule.role for rule in self.rules}, **dict.fromkeys(others, self.roles[0])}
        chosen = draw.sample(sorted(owners), draw.randint(self.fewest, self.most))
        styles = {rule.field: rule.style for rule in (*self.rules, *local)}
        fields = {role: [field for field in chosen if owners[field] == role] for role in self.roles}
        return {
            "order": f"{split}-{number:03d}",
            "fields": {role: names for role, names in fields.items() if names},
            "expected": {field: styles.get(field, PLAIN) for field in chosen},
        }


def easy(seed: int = 0) -> PromptWorld:
    """Five rules, little noise, partial credit."""
    return PromptWorld(rules=_RULES, seed=seed)


def noisy(seed: int = 0) -> PromptWorld:
    """Every fourth field is written in a random style."""
    return PromptWorld(rules=_RULES, noise=0.25, seed=seed)


def sparse(seed: int = 0) -> PromptWorld:
    """Only complete answers score."""
    return PromptWorld(rules=_RULES, is_sparse=True, seed=seed)


def duo(seed: int = 0) -> PromptWorld:
    """A writer and a checker with a prompt each; every second rule is the checker's."""
    roles = ("writer", "checker")
    rules = tuple(msgspec.structs.replace(rule, role=roles[index % 2]) for index, rule in enumerate((*_RULES, _SIXTH)))
    return PromptWorld(rules=rules, seed=seed)


def memorising(seed: int = 0) -> PromptWorld:
    """Like ``easy``, but every second proposal notes the answers of single training orders."""
    return PromptWorld(rules=_RULES, memorises=0.5, seed=seed)


def cluttered(seed: int = 0) -> PromptWorld:
    """Like ``easy``, but training orders have three more fields, whose rules are clutter for all other orders."""
    return PromptWorld(rules=_RULES, local=_LOCAL, seed=seed)


def paired(seed: int = 0) -> PromptWorld:
    """Like ``easy``, but four of the five rules are two pairs that have to be found together."""
    return PromptWorld(rules=_RULES, partners=(("date", "amount"), ("name", "phone")), seed=seed)


def crowded(seed: int = 0) -> PromptWorld:
    """Like ``easy``, but every line of the prompt distracts."""
    return PromptWorld(rules=_RULES, crowding=0.03, seed=seed)


def demonstrable(seed: int = 0) -> PromptWorld:
    """Like ``easy``, with two rules that no feedback names: only examples of good answers can teach them."""
    return PromptWorld(rules=(*_RULES, *_UNSAID), unsaid=("code", "unit"), knack=0.3, seed=seed)


WORLDS = {
    "easy": easy,
    "noisy": noisy,
    "sparse": sparse,
    "two-prompt": duo,
    "memorising": memorising,
    "cluttered": cluttered,
    "paired": paired,
    "crowded": crowded,
}
"""The settings by name in which every optimiser can find all rules; ``demonstrable`` is none of them."""


def prompt_name(role: str) -> str:
    """Return the name of the resource that holds a role's prompt."""
    return f"{role}_prompt"


def line_of(field: str, style: str) -> str:
    """Return the line that makes the task model write a field in a style."""
    return f"Write the {field} as {style}."


def note_of(order: str, field: str, style: str) -> str:
    """Return the line that makes the task model write a field of one order in a style."""
    return f"For order {order} write the {field} as {style}."


def obeyed_styles(prompt: str, *, order: str = "") -> dict[str, str]:
    """The style that a prompt asks for, by field; of two lines about one field the later one counts.

    Notes count only for the ``order`` that they name, and there before everything else; answers that the prompt shows
    count where no line does.
    """
    notes = {field: style for named, field, style in NOTE.findall(prompt) if named == order}
    shown = dict(SHOWN.findall("\n".join(OUTPUT.findall(prompt))))
    return {**shown, **dict(LINE.findall(prompt)), **notes}


def is_brief(styles: Mapping[str, str]) -> bool:
    """True if a prompt holds the trap."""
    return styles.get(TRAP[0]) == TRAP[1]


def order_text(task_id: str, fields: Sequence[str]) -> str:
    """The text of a task, as the task model reads it."""
    return f"Order {task_id}. Fields: {', '.join(fields)}."


def complete_order(text: str, *, world: PromptWorld, seed: str) -> dict[str, str]:
    """Return the style in which the task model writes each field of an order; it knows nothing of the rules.

    ``text`` is a prompt with its order. A field that is left out is missing from the result.
    """
    found = FIELDS.findall(text)[-1:]  # before the order itself, the prompt may show others
    order, listed = found[0] if found else ("", "")
    asked = obeyed_styles(text, order=order)
    styles, noise = world.heeded(asked), world.slips(asked)
    fields = listed.split(", ") if found else []
    known = {rule.field: rule.style for rule in world.rules if rule.field in world.unsaid}
    answer: dict[str, str] = {}
    for field in fields:
        draw = random.Random(f"{seed}|{field}")
        # All three are drawn whatever the prompt says, so that two prompts meet the same luck on the same field.
        is_slip, slip, is_left_out = draw.random() < noise, draw.choice(STYLES), draw.random() < world.harm
        style = styles.get(field, known[field] if field in known and draw.random() < world.knack else PLAIN)
        if not (is_left_out and is_brief(styles)):
            answer[field] = slip if is_slip else style
    return answer


def judge(world: PromptWorld, task: Any, answer: Mapping[str, str], *, is_short: bool, seed: str) -> tuple[float, str]:
    """Return the score of an answer and its feedback: one sentence per wrong field, and nagging about length."""
    expected: dict[str, str] = task["expected"]
    owners = {field: role for role, fields in task["fields"].items() for field in fields}
    wrong = {field: style for field, style in expected.items() if answer.get(field) != style}
    said = [
        f"[{owners[field]}] {field}: not as it should be."
        if field in world.unsaid
        else f"[{owners[field]}] {field}: expected {style}, found {answer.get(field, 'nothing')}."
        for field, style in wrong.items()
    ]
    if not is_short and random.Random(f"{seed}|nagging").random() < world.nagging:
        role = next(iter(task["fields"]))
        said.append(f"[{role}] {TRAP[0]}: expected {TRAP[1]}, found wordy.")
    score = float(not wrong) if world.is_sparse else 1.0 - len(wrong) / len(expected)
    return score, " ".join(said)


_RULES = (
    StyleRule("date", "ISO 8601"),
    StyleRule("amount", "EUR"),
    StyleRule("name", "upper case"),
    StyleRule("phone", "digits only"),
    StyleRule("quantity", "full words"),
)
_LOCAL = (
    StyleRule("shelf", "upper case"),
    StyleRule("batch", "digits only"),
    StyleRule("pallet", "full words"),
)
_UNSAID = (StyleRule("code", "upper case"), StyleRule("unit", "full words"))
_SIXTH = StyleRule("street", "upper case")
