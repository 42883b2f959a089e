"""Write the databases, the tasks and the dialogues of the example: `python make_data.py --out out/data --seed 0`.

Training, validation and dialogue questions are three disjoint sets.

The dialogues for `write` and `rewrite` come from a teacher who grows careless: the first ones show how to write the
query, the last ones mostly guess a column that does not exist. A model that imitates them has the skill and a bad
habit, so it starts with a low reward, and reinforcement learning has something to find out.
The dialogues for `check` tell queries that ran from those that failed.
"""

import argparse
import json
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import agent
from domains import DOMAINS, make_database
from questions import SHAPES, Question, every_question

TRAIN, VALIDATION = 600, 120
DILIGENT, CARELESS, CHECKS = 6720, 960, 1600
LIKELY_RIGHT, RARELY_RIGHT = 0.95, 0.07
PER_SHAPE = 60
"""Questions of one shape and domain at most, so that no shape crowds the others out."""

Row = dict[str, object]


def pool(folder: Path, *, seed: int) -> list[Question]:
    """Return all questions that have an answer, the shapes in equal parts as far as they last, in random order."""
    rng = random.Random(f"{seed}/pool")
    chosen: list[Question] = []
    for domain in DOMAINS:
        connection = agent.connect(str(folder / f"{domain.table}.db"))
        asked = [q for q in every_question(domain) if has_answer(connection, q)]
        connection.close()
        for shape in SHAPES:
            of_shape = [q for q in asked if q.shape == shape]
            chosen += rng.sample(of_shape, min(PER_SHAPE, len(of_shape)))
    rng.shuffle(chosen)
    return chosen


def has_answer(connection: sqlite3.Connection, question: Question) -> bool:
    """Return true if the query gives anything but nothing, NULL or zero."""
    return connection.execute(question.query).fetchall() not in ([], [(None,)], [(0,)])


def task(question: Question) -> Row:
    """Return a task; `query` is hidden from the agent and known to the reward."""
    return {"question": question.text, "database": f"{question.domain.table}.db", "query": question.query}


def careless(question: Question) -> str:
    """Return what the teacher writes in a hurry: a column that does not exist."""
    return f"SELECT value FROM {question.domain.table}"


def slip(question: Question, rng: random.Random) -> str:
    """Return the right query with a mistake in it."""
    words = question.query.split()
    place = rng.randrange(1, len(words))
    return " ".join((*words[:place], *words[place + 1 :]))


def dialogue(system: str, user: str, answer: str) -> Row:
    """Return one exchange as the OpenAI chat API has it."""
    roles = ("system", "user", "assistant")
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, (system, user, answer), strict=True)]}


def verdict(result: str) -> str:
    """Return what the checker should say about a result."""
    return "no, it failed" if result.startswith("error") else "yes, it gave rows"


def writing(folder: Path, question: Question, *, is_right: bool, rng: random.Random) -> Row:
    """Return a dialogue of `write`, or of `rewrite` after a failed query."""
    state = agent.asked(str(folder / f"{question.domain.table}.db"), question.text)
    if rng.random() < 0.6:
        answer = question.query if is_right else careless(question)
        return dialogue(agent.WRITE, agent.written(state), answer)
    state["query"], state["result"] = failure(state["database"], question, rng)
    state["verdict"] = verdict(state["result"])
    return dialogue(agent.REWRITE, agent.rewritten(state), question.query if is_right else state["query"])


def failure(database: str, question: Question, rng: random.Random) -> tuple[str, str]:
    """Return a query that the checker would refuse, and what came of it."""
    while True:
        query = careless(question) if rng.random() < 0.7 else slip(question, rng)
        result = agent.run_query(database, query)
        if verdict(result).startswith("no"):
            return query, result


def checking(folder: Path, question: Question, rng: random.Random) -> Row:
    """Return a dialogue of `check`."""
    state = agent.asked(str(folder / f"{question.domain.table}.db"), question.text)
    query = rng.choice((question.query, question.query, careless(question), slip(question, rng)))
    state["query"], state["result"] = query, agent.run_query(state["database"], query)
    return dialogue(agent.CHECK, agent.checked(state), verdict(state["result"]))


def dialogues(folder: Path, questions: Sequence[Question], *, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the teacher's dialogues, diligent ones first, and the checker's."""
    rng = random.Random(f"{seed}/dialogues")
    rates = [LIKELY_RIGHT] * DILIGENT + [RARELY_RIGHT] * CARELESS
    taught = [writing(folder, rng.choice(questions), is_right=rng.random() < rate, rng=rng) for rate in rates]
    return taught, [checking(folder, rng.choice(questions), rng) for _ in range(CHECKS)]


def write_lines(path: Path, rows: Sequence[Row]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the databases, train.jsonl, val.jsonl, write.jsonl and check.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/data"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    out, seed = options.out, options.seed
    out.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        make_database(domain, out, seed=seed)
    questions = pool(out, seed=seed)
    train, val, rest = questions[:TRAIN], questions[TRAIN : TRAIN + VALIDATION], questions[TRAIN + VALIDATION :]
    taught, checks = dialogues(out, rest, seed=seed)
    write_lines(out / "train.jsonl", [task(q) for q in train])
    write_lines(out / "val.jsonl", [task(q) for q in val])
    write_lines(out / "write.jsonl", taught)
    write_lines(out / "check.jsonl", checks)
    print(f"wrote {len(DOMAINS)} databases, {len(train)} training tasks, {len(val)} validation tasks and")
    print(f"{len(taught)} + {len(checks)} dialogues about {len(rest)} other questions to {out}")


if __name__ == "__main__":
    main()
