"""Draws the demonstrations of new candidates from good runs.

A run is good if its reward is the best that any candidate got on its task, and above the mean of the prompt that is to
be improved: runs that are merely usual for that prompt teach nothing.

The demonstration's input is the text that filled the prompt in the call that read it (for a prompt of several messages,
in its last user message); its output is the answer to that call. If no recorded call read the prompt, the input is the
task as the agent sees it, and the output is the last object that the agent reported. Neither is cut, because half an
answer is a wrong one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agl import semconv
from agl.dialects import call_messages
from agl.schemas import ModelCall, PromptTemplate, Resource, Rollout, Span
from agl_algo_apo.proposals.critics import SHOWN, Assignment
from agl_algo_apo.proposals.evidence import recorded_run
from agl_algo_apo.search.tools import Origin, SearchTools
from agl_algo_apo.texts.demonstrations import Demonstration, as_text, is_escapable
from agl_algo_apo.texts.filled_templates import FilledTemplate, filled_template
from agl_algo_apo.texts.lineage import PromptCandidate, resource_of
from agl_algo_apo.texts.messages import messages_of

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from agl.contracts import AlgorithmContext
    from agl_algo_apo.measurement.scores import Measured, Scores

DEMONSTRATE_EVERY = 3
"""The interval, in steps, at which demonstrations are drawn instead of instructions written; the first is step 4."""


class Demonstrator:
    """Makes children that have the parent's instructions but other demonstrations.

    Args:
        search: The search, whose tools it uses.
    """

    def __init__(self, search: SearchTools) -> None:
        self._search = search

    def is_due(self, step: int) -> bool:
        """Return true if this step draws demonstrations."""
        return self._search.settings.demonstrations.most > 0 and step % DEMONSTRATE_EVERY == 1

    async def children(
        self, parent: PromptCandidate, failures: Sequence[int], step: int
    ) -> list[tuple[PromptCandidate, Assignment]]:
        """Return children that passed the static checks, each with the training tasks of its trial.

        These tasks are failures of the parent, and no demonstration comes from one of them.
        """
        tasks, search = tuple(failures[:SHOWN]), self._search
        # Templates and messages can hold demonstrations; other JSON cannot.
        names = [r.name for r in search.rules if isinstance(r.seed, PromptTemplate) or messages_of(r.seed)]
        mean = search.evaluator.mean(parent.id, "train")
        found = good_runs(search.lineage.all(), search.evaluator.scores, above=mean)
        pool = [run for run in found if run.task not in tasks]
        children: dict[str, tuple[PromptCandidate, Assignment]] = {}
        for k in range(search.settings.branch_factor if names and pool else 0):
            name = names[(step // DEMONSTRATE_EVERY + k) % len(names)]
            shown = await self._drawn(parent, name, pool, search.random(step, f"demonstrations {k}"))
            proposal = search.proposal(
                [parent],
                parent.instructions,
                step=step,
                operator="demonstrate",
                demonstrations={**parent.demonstrations, name: shown},
            )
            origin = Origin(evidence=tuple(each.rollout for each in shown))
            child = await search.screen(proposal, parent, origin=origin)
            if child is not None:
                children[child.id] = (child, Assignment(name, tasks))
        return list(children.values())

    async def _drawn(
        self, parent: PromptCandidate, name: str, pool: Sequence[GoodRun], draw: random.Random
    ) -> tuple[Demonstration, ...]:
        """Return a random part of the parent's demonstrations for a resource, filled up with new ones from the pool."""
        settings, had = self._search.settings, parent.demonstrations.get(name, ())
        like = next(rules.seed for rules in self._search.rules if rules.name == name)
        shown = draw.sample(had, draw.randint(0, len(had)))
        left = settings.demonstrations.max_chars - sum(len(each.text) for each in shown)
        # At random, but runs with a better reward first: a partly correct answer also shows its mistakes.
        for run in sorted(draw.sample(pool, len(pool)), key=lambda run: -run.measured.reward):
            if len(shown) >= settings.demonstrations.most:
                break
            if run.task in {each.task for each in shown}:
                continue
            resource = resource_of(run.candidate.texts[name], like)
            found = await read_demonstration(self._search.context, run, resource=resource)
            if found is not None and is_escapable(found, like=like) and len(found.text) <= left:
                shown.append(found)
                left -= len(found.text)
        return tuple(shown)


class GoodRun(NamedTuple):
    """A rollout of a training task, and the candidate with whose texts it ran."""

    task: int
    candidate: PromptCandidate
    measured: Measured


def good_runs(candidates: Sequence[PromptCandidate], scores: Scores, *, above: float) -> list[GoodRun]:
    """Return the best run of every training task whose best reward exceeds ``above``, in task order.

    Among equal runs the newest candidate's is chosen, because it is the most similar to future ones.
    """
    best: dict[int, GoodRun] = {}
    for candidate in candidates:
        for task in scores.rewards(candidate.id, "train"):
            measured = scores.get(candidate.id, "train", task)
            if measured is None or measured.status != "ok":
                continue
            if task not in best or measured.reward >= best[task].measured.reward:
                best[task] = GoodRun(task, candidate, measured)
    return [best[task] for task in sorted(best) if best[task].measured.reward > above]


async def read_demonstration(context: AlgorithmContext, run: GoodRun, *, resource: Resource) -> Demonstration | None:
    """Return the demonstration that a run gives for a prompt.

    The result is ``None`` if the run recorded no output, or is no longer in the store.

    Args:
        context: Holds the store.
        run: The run.
        resource: The prompt as it was in that run.
    """
    rollout_id = run.measured.rollout
    if (recorded := await recorded_run(context, rollout_id)) is None:
        return None
    rollout, spans = recorded
    prompt, question = filled_template(resource), _question(resource)
    calls = [span.call for span in spans if span.call is not None and not span.call.error]
    read = [found for call in calls if prompt is not None and (found := _exchange(call, prompt, rollout, question))]
    shown = read[-1] if read else _reported(spans, rollout)
    return None if shown is None else Demonstration(input=shown[0], output=shown[1], rollout=rollout_id, task=run.task)


def _question(resource: Resource) -> FilledTemplate | None:
    """Return a matcher for the last user message after a prompt's first message; ``None`` without such a message."""
    asked = [text for role, text in messages_of(resource)[1:] if role == "user"]
    return filled_template(PromptTemplate(template=asked[-1])) if asked else None


def _exchange(
    call: ModelCall, prompt: FilledTemplate, rollout: Rollout, question: FilledTemplate | None
) -> tuple[str, str] | None:
    """Return input and output of a call that read the prompt and was answered with text; else ``None``."""
    messages = call_messages(call)
    texts = [as_text(message.get("content") or "") for message in messages]
    if not messages or messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
        return None
    filled = [found for text in texts[:-1] if (found := prompt.search(text))]
    if not filled or not texts[-1].strip():
        return None
    asked = [
        found.values
        for message, text in zip(messages[:-1], texts, strict=False)
        if question is not None and message.get("role") == "user" and not prompt.search(text)
        if (found := question.search(text))
    ]
    values = {**filled[-1].values, **(asked[-1] if asked else {})}
    return _input(values, rollout), texts[-1].strip()


def _input(filled: Mapping[str, str], rollout: Rollout) -> str:
    values = {name: value.strip() for name, value in filled.items() if value.strip()}
    if len(values) == 1:
        return next(iter(values.values()))
    return "\n".join(f"{name}: {value}" for name, value in values.items()) or as_text(rollout.visible_task)


def _reported(spans: Sequence[Span], rollout: Rollout) -> tuple[str, str] | None:
    """Return the task and the last object that the agent reported, both as text; ``None`` if it reported no object."""
    objects = [span.attributes[semconv.OBJECT] for span in spans if semconv.OBJECT in span.attributes]
    return (as_text(rollout.visible_task), as_text(objects[-1])) if objects else None
