"""Writes the results of the matrix as a page of the reference."""

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from agl_harness.table import SITUATIONS, Harness
from tools.harness_matrix.cells import Result

_HEAD = """\
# Coding harnesses

`nox -s harness` runs every harness of the table against a scripted model behind the gateway, and writes this page.
{when}, {system}, {network}.

A cell says yes where the harness did what the column says.
Then each sampled token is in exactly one row, and no helper call or cut answer is in any.
Calls of messages, responses and Google's API reach the scripted model as chat completions, as those of any policy in \
training do, whatever serves it.

| Column | The harness |
|---|---|
| one turn | answers a task |
| tool | runs a command in its workspace, and goes on with its output |
| parallel tools | runs two commands of one answer |
| sub-agent | hands a part of the task to a sub-agent, which calls the model |
| compaction | makes its conversation shorter by a summary |
| 429 and retry | is refused with 429 once, and calls again |
| stream cut | loses a stream in the middle; what had arrived trains nothing |
| resume | goes on with its session in a second run |

## Results

"""


def summary_of(results: Sequence[Result]) -> str:
    """Return one line with the counts."""
    green = sum(not result.cause for result in results)
    calls, helpers = sum(one.calls for one in results), sum(one.helpers for one in results)
    return f"{green} of {len(results)} cells are green; of {calls} model calls {helpers} were helper calls"


def page_of(
    results: Sequence[Result], table: Mapping[str, Harness], versions: Mapping[str, str], *, is_offline: bool
) -> str:
    """Return the page."""
    network = "in a network namespace without a way out" if is_offline else "with the network of the machine"
    when = datetime.now(UTC).strftime("%-d %B %Y")
    system = f"{platform.system()} {platform.machine()}"
    found = {(one.harness, one.scenario): one for one in results}
    lines = [_HEAD.format(when=when, system=system, network=network)]
    lines.append(f"| Harness | Version | Wire | {' | '.join(SITUATIONS)} |\n|{'---|' * (3 + len(SITUATIONS))}\n")
    for name, harness in table.items():
        cells = [_mark(found.get((name, scenario))) for scenario in SITUATIONS]
        lines.append(f"| {harness.label} | {versions[name]} | {harness.dialect} | {' | '.join(cells)} |\n")
    lines.append(f"\n{summary_of(results)}.\n")
    causes = [f"- {table[one.harness].label}, {one.scenario}: {one.cause}.\n" for one in results if one.cause]
    if causes:
        lines += ["\n## Cells that are not green\n\n", *causes]
    lines.append("\n## Names on the record\n\n| Harness | Agents | Helper calls of all |\n|---|---|---|\n")
    for name, harness in table.items():
        own = [one for one in results if one.harness == name]
        agents = sorted({agent for one in own for agent in one.agents})
        shown = ", ".join(f"`{agent}`" for agent in agents)
        counts = f"{sum(one.helpers for one in own)} of {sum(one.calls for one in own)}"
        lines.append(f"| {harness.label} | {shown} | {counts} |\n")
    return "".join(lines)


def _mark(result: Result | None) -> str:
    return "" if result is None else "no" if result.cause else "yes"
