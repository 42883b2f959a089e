"""Write the wiki, the questions and the dialogues of the example: `python make_data.py --out out/data --seed 0`.

The wiki is about people and has one passage per fact, such as `The mentor of Ada Holt is Boris Kane.` A question needs
two of them: `What is the home of the mentor of Ada Holt?` People, facts and questions follow from the seed.

The people live in three regions: one for the dialogues, one for training, one for validation. No fact leads from one
region to another, so no passage that answers a validation question, and no name in it, was ever read in training. Names
are combinations of a closed set of words: a small model can learn to copy them, and has nothing to gain from
remembering them.

The dialogues come from a teacher who grows careless: the first ones search twice and reply with the name alone, the
last ones mostly guess after the first search. A model that imitates them has the skill and a bad habit, so it starts
with a low reward, and reinforcement learning has something to find out.
"""

import argparse
import json
import random
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import wiki

FIRST, LAST, TOWNS, CRAFTS, PETS = (
    words.split()
    for words in (
        "Ada Boris Cora Dorin Edda Felix Greta Hugo Ines Jonas Karla Luca Mira Nils Olga Petra Quentin Rosa Simon "
        "Tilda Ugo Vera Wanda Xenia Yara Zeno Alma Bruno Clara Dario Elsa Frida",
        "Holt Kane Venn Marsh Rook Stone Vale Wick Frost Lark Thorn Birch Crane Dusk Ember Flint Grove Heath Ivory "
        "Jade Knoll Loom Moss Nettle Oakes Pike Quill Reed Sorrel Teal Umber Wren",
        "Oakford Redbay Eastmoor Highgate Milton Norwell Ashby Linden Farley Kingsley Brookton Dunmore Elmwood "
        "Foxley Granby Hadley Ipswold Kelby Langdon Marlow Netherby Orwell Penrith Ridley",
        "weaver baker potter tailor miller cooper mason painter printer glazier tanner smith carver dyer brewer "
        "fletcher saddler thatcher turner barber jeweller hatter gardener sailor",
        "heron otter badger falcon rabbit spaniel tabby canary lizard raven terrier hamster parrot goldfish ferret "
        "pony tortoise magpie squirrel donkey gecko owl hedgehog beagle",
    )
)

HOPS = ("mentor", "rival", "neighbour")
"""Relations that lead to another person."""

ENDS = {"home": TOWNS, "craft": CRAFTS, "pet": PETS}
"""Relations that lead to an answer, and what it may be."""

SYSTEM = "Search one fact at a time, then reply with the answer alone."
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the wiki.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}

REGIONS = {"dialogues": 480, "train": 240, "val": 80}
"""People per region."""

TRAIN, VALIDATION, DIALOGUES = 1000, 96, 3600
CARELESS = 1 / 9
"""Share of the dialogues, the last ones, that are of the teacher's bad days."""

CAREFUL_BEFORE, CAREFUL_AFTER = 0.8, 0.3
"""Share of dialogues with both searches, on good and on bad days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One passage of the wiki: `relation` of `subject` is `value`."""

    subject: str
    relation: str
    value: str

    @property
    def text(self) -> str:
        """The passage."""
        return f"The {self.relation} of {self.subject} is {self.value}."

    @property
    def query(self) -> str:
        """The search query.

        It begins with "the", so that the relation is the token that it is in the question, with a space before it, and
        is copied as names are. After a quotation mark it would be a token of its own, and with some seeds the model
        gave the tokens of two relations one meaning, which no reward repairs.
        """
        return f"the {self.relation} of {self.subject}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its two facts, in the order in which they are found."""

    first: Fact
    second: Fact

    @property
    def text(self) -> str:
        """The task's question."""
        return f"What is the {self.second.relation} of the {self.first.relation} of {self.first.subject}?"


def people(*, seed: int) -> dict[str, list[str]]:
    """Return the names of every region; none is in two."""
    names = [f"{first} {last}" for first, last in product(FIRST, LAST)]
    random.Random(seed).shuffle(names)
    left = iter(names)
    return {region: list(islice(left, count)) for region, count in REGIONS.items()}


def facts(names: list[str], *, seed: int) -> list[Fact]:
    """Return all facts about the people of one region; whom they know lives there too."""
    rng = random.Random(seed)
    found: list[Fact] = []
    for name in names:
        others = rng.sample([other for other in names if other != name], len(HOPS))
        found += [Fact(subject=name, relation=r, value=other) for r, other in zip(HOPS, others, strict=True)]
        found += [Fact(subject=name, relation=r, value=rng.choice(values)) for r, values in ENDS.items()]
    return found


def questions(known: list[Fact], *, seed: int) -> list[Question]:
    """Return every two-hop question that the facts answer, in random order."""
    by_key = {(fact.subject, fact.relation): fact for fact in known}
    found = [
        Question(first=fact, second=by_key[fact.value, end]) for fact in known if fact.relation in HOPS for end in ENDS
    ]
    random.Random(seed).shuffle(found)
    return found


def task(question: Question) -> dict[str, str]:
    """Return a task; `answer` is hidden from the agent and known to the reward."""
    return {"question": question.text, "answer": question.second.value}


def says(text: str) -> dict[str, object]:
    """Return the assistant's last message."""
    return {"role": "assistant", "content": text}


def looks_up(fact: Fact, *, path: Path, number: int) -> list[dict[str, object]]:
    """Return a search for one fact, and what the wiki really answers."""
    call = {"name": "search", "arguments": json.dumps({"query": fact.query})}
    name = f"call_{number}"
    found = "\n".join(wiki.search(path, fact.query))
    return [
        {"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": name, "content": found},
    ]


def dialogue(question: Question, *, path: Path, is_careful: bool) -> dict[str, object]:
    """Return one conversation as the OpenAI chat API has it; a careless teacher guesses after the first search."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question.text},
        *looks_up(question.first, path=path, number=1),
    ]
    if is_careful:
        messages += [*looks_up(question.second, path=path, number=2), says(question.second.value)]
    else:
        messages.append(says(f"I guess it is {question.first.value}."))
    return {"messages": messages, "tools": [TOOL]}


def dialogues(asked: list[Question], *, path: Path, seed: int) -> list[dict[str, object]]:
    """Return the teacher's dialogues, careful ones first."""
    rng = random.Random(seed)
    bad = round(len(asked) * CARELESS)
    rates = [CAREFUL_BEFORE] * (len(asked) - bad) + [CAREFUL_AFTER] * bad
    return [dialogue(q, path=path, is_careful=rng.random() < rate) for q, rate in zip(asked, rates, strict=True)]


def write_lines(path: Path, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write wiki.db, train.jsonl, val.jsonl and dialogues.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dialogues", type=int, default=DIALOGUES, help="fewer are made faster, and teach less")
    options = parser.parse_args()
    out, seed = options.out, options.seed
    out.mkdir(parents=True, exist_ok=True)
    known = {region: facts(names, seed=seed) for region, names in people(seed=seed).items()}
    asked = {region: questions(found, seed=seed) for region, found in known.items()}
    passages = [(fact.subject, fact.text) for found in known.values() for fact in found]
    random.Random(seed).shuffle(passages)
    path = out / "wiki.db"
    wiki.write(path, passages)
    taught = dialogues(asked["dialogues"][: options.dialogues], path=path, seed=seed)
    train, val = asked["train"][:TRAIN], asked["val"][:VALIDATION]
    write_lines(out / "train.jsonl", [task(q) for q in train])
    write_lines(out / "val.jsonl", [task(q) for q in val])
    write_lines(out / "dialogues.jsonl", taught)
    print(
        f"wrote {len(passages)} passages, {len(train)} training tasks, {len(val)} validation tasks and "
        f"{len(taught)} dialogues to {out}"
    )


if __name__ == "__main__":
    main()
