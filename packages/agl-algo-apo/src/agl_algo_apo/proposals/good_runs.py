"""Good runs: the recorded rollouts of training tasks that may be shown as demonstrations, and their inputs and outputs.

A run is good where its reward is the best that any candidate got on its task, and above the mean of the prompt that is
to be improved: runs that are merely usual for it teach nothing. Its input is made of what filled the prompt in the call
that read it (of a prompt of several messages, its last user message), its output of the answer to that call; where no
recorded call read it, of the task as the agent sees it and of the last object that the agent reported. Neither is cut:
half an answer is a wrong one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agl import semconv
from agl.contracts import AlgorithmContext, RolloutQuery
from agl.dialects import call_messages
from agl.errors import NotFoundError
from agl.schemas import ModelCall, PromptTemplate, Resource, Rollout, Span
from agl.stores import all_spans
from agl_algo_apo.measurement.scores import Measured, Scores
from agl_algo_apo.texts.demonstrations import Demonstration, as_text
from agl_algo_apo.texts.filled_templates import FilledTemplate, filled_template
from agl_algo_apo.texts.lineage import PromptCandidate
from agl_algo_apo.texts.messages import messages_of


class GoodRun(NamedTuple):
    """A rollout of a training task, with the candidate that was tried in it."""

    task: int
    candidate: PromptCandidate
    measured: Measured


def good_runs(candidates: Sequence[PromptCandidate], scores: Scores, *, above: float) -> list[GoodRun]:
    """Return the best run of every training task whose best reward is above a mean, in the order of the tasks.

    Of equal ones it is that of the newest candidate, which is the most like those to come.
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
    """Return what a run shows about a prompt, ``None`` where it recorded no output, or is no longer in the store.

    Args:
        context: Has the store.
        run: The run.
        resource: The prompt as it was in that run.
    """
    rollout_id = run.measured.rollout
    try:
        rollout = (await context.store.rollouts(RolloutQuery(ids=(rollout_id,))))[0]
        spans = await all_spans(context.store, rollout_id)
    except NotFoundError:
        return None
    prompt, question = filled_template(resource), _question(resource)
    calls = [span.call for span in spans if span.call is not None and not span.call.error]
    read = [found for call in calls if prompt is not None and (found := _exchange(call, prompt, rollout, question))]
    shown = read[-1] if read else _reported(spans, rollout)
    return None if shown is None else Demonstration(input=shown[0], output=shown[1], rollout=rollout_id, task=run.task)


def _question(resource: Resource) -> FilledTemplate | None:
    """Return what recognises the last user message; ``None`` where that is the first message, and for one text."""
    asked = [text for role, text in messages_of(resource)[1:] if role == "user"]
    return filled_template(PromptTemplate(template=asked[-1])) if asked else None


def _exchange(
    call: ModelCall, prompt: FilledTemplate, rollout: Rollout, question: FilledTemplate | None
) -> tuple[str, str] | None:
    """Return input and output of a call that read the prompt and was answered with text."""
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
    """Return the task and the last object that the agent reported."""
    objects = [span.attributes[semconv.OBJECT] for span in spans if semconv.OBJECT in span.attributes]
    return (as_text(rollout.visible_task), as_text(objects[-1])) if objects else None
