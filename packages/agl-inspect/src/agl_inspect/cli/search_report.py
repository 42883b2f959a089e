"""The report of a prompt search as Markdown: scores, costs, the first text and the winner, and every candidate."""

import difflib
import re
from collections.abc import Iterator, Sequence

from agl.contracts import Store
from agl.errors import ConfigError
from agl_inspect.versions.candidates import COLUMNS, Candidate, Search, searches_of


async def report(store: Store, name: str, *, experiment: str | None) -> str:
    """Return the report on the searches of one experiment's newest run that tuned a resource.

    Raises:
        ConfigError: No search tuned it, or those of several experiments did and none is named.
    """
    every = await searches_of(store, name)
    names = sorted({search.experiment for search in every})
    if not every or (experiment is not None and experiment not in names):
        where = f" in the experiment {experiment!r}" if experiment and names else ""
        known = f"; it was tuned in: {', '.join(names)}" if names else "; agl resources list shows what there is"
        raise ConfigError(f"no prompt search has tuned {name!r}{where}{known}")
    if experiment is None and len(names) > 1:
        raise ConfigError(f"{name!r} was tuned in several experiments; name one of {', '.join(names)} by --experiment")
    found = [search for search in every if search.experiment == (experiment or names[0])]
    newest = [search for search in found if search.run == found[-1].run]
    return "\n".join(line for search in newest for line in _search(search, name)) + "\n"


def _search(search: Search, name: str) -> Iterator[str]:
    first = search.candidates[0]
    winner = next((c for c in search.candidates if c.id == search.best), first)
    yield from (f"# {name}: {search.algorithm} in {search.experiment}, run {search.run}", "")
    yield from (f"Ended by {search.stop_reason}" if search.stop_reason else "Not ended yet.", "")
    yield from ("## Scores", "", *_scores(first, winner), "")
    final = [gate.words for gate in winner.gates if gate.gate.startswith("final measurement")]
    yield from (f"The winner {final[-1]}.", "") if final else ()
    yield from ("## Costs", "", *_costs(search), "")
    if winner.id == first.id:
        yield from ("## The first text stays", "", *_fenced(first.texts[name], "text"), "")
    else:
        yield from ("## First text", "", *_fenced(first.texts[name], "text"), "")
        yield from (f"## Winner {winner.id}", "", *_fenced(winner.texts[name], "text"), "")
        changes = difflib.unified_diff(
            first.texts[name].splitlines(), winner.texts[name].splitlines(), first.id, winner.id, lineterm=""
        )
        yield from ("## Changes", "", *_fenced("\n".join(changes), "diff"), "")
    yield from ("## Candidates", "", *_table(COLUMNS, [candidate.row for candidate in search.changed(name)]), "")


def _scores(first: Candidate, winner: Candidate) -> Iterator[str]:
    """Yield a table of the mean rewards of both, with their 95 % intervals, by the tasks that they are from."""
    origins = list(dict.fromkeys([*first.scores, *winner.scores]))
    owners = {"first text": first, "winner": winner} if winner.id != first.id else {"first text": first}
    cells = [
        (label, *(owner.scores[origin].words if origin in owner.scores else "-" for origin in origins))
        for label, owner in owners.items()
    ]
    yield from _table(("", *origins), cells)


def _costs(search: Search) -> Iterator[str]:
    spent, tokens = search.spent, sum(candidate.agent.tokens for candidate in search.candidates)
    yield f"- {spent.rollouts} rollouts of the agent, {tokens} tokens in the recorded model calls of the candidates"
    yield f"- {spent.calls} questions to the optimiser's model, {spent.tokens} tokens"
    if spent.money:
        yield f"- {spent.money:.4g} in money"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate((columns, *rows)):
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"
        if number == 0:
            yield f"|{'---|' * len(columns)}"


def _fenced(text: str, language: str) -> Iterator[str]:
    """Yield a text in a fence that is longer than any in it."""
    fence = "`" * max(3, 1 + max((len(found) for found in re.findall("`+", text)), default=0))
    yield from (f"{fence}{language}", *text.splitlines(), fence)
