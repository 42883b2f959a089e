"""Ends a run that tunes a text which appears in no model call, because such a search would be in vain."""

import html
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from agl.contracts import CallUse, Recording
from agl.errors import ConfigError
from agl.schemas import JsonResource, PromptTemplate, Resource
from agl_run.plan import Plan
from agl_run.watch.observers import Batch, Observer
from agl_run.worker.current import LiveResources

_LOG = logging.getLogger("agl_run.run")

ENOUGH = 16
"""The number of rollouts without a tuned text after which a run ends."""

_SENT = frozenset({"contents", "input", "instructions", "messages", "prompt", "system", "systemInstruction", "tools"})
"""The fields of a request, in any API, that have text for the model."""

_BREAKS = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{[^{}]*\}|\n|(?<=[.:]) ")
"""A regular expression for the separators in a tuned text: placeholders, line ends, and ends of sentences."""


class ArrivalReport(Observer):
    """Searches the requests of the first rollouts for the texts that algorithms tune.

    One sentence of a text is enough, since agents may use a part of it or put it into another form. Values without
    sentences, such as numbers, are not judged; neither are failed rollouts, nor those without a request that has text.
    The first batch without a tuned text is reported, and the run ends once :data:`ENOUGH` rollouts had none of it.

    Args:
        plan: The experiment.
        live: The live versions of the resources.
        is_trial: If true, a text that does not arrive is only reported.
    """

    def __init__(self, plan: Plan, *, live: LiveResources, is_trial: bool = False) -> None:
        self._live, self._is_trial = live, is_trial
        self._open = {name for one in plan.config.algorithm for name in one.tunes} - set(plan.config.policy)
        self._missed = dict.fromkeys(self._open, 0)
        self._reported: set[str] = set()

    def rollout(self, caller: str, recording: Recording) -> None:
        """Search a rollout's requests for the texts that have not been found yet."""
        if not self._open or recording.rollout.status != "succeeded":
            return
        text = ""
        for name in list(self._open):
            version = self._live.current(name)
            parts = _parts(version.resource)
            if not parts:
                self._open.discard(name)
            # Only the live version is at hand; rollouts of a candidate are judged by those of the version it came from.
            if not parts or recording.rollout.resources.get(name) != version.version:
                continue
            text = text or _text_of(recording)
            if not text:
                return
            if any(form in text for part in parts for form in _forms(part)):
                self._open.discard(name)
            else:
                self._missed[name] += 1

    def batch(self, batch: Batch) -> None:
        """Report a tuned text that was in none of the requests so far, and end the run once that is certain.

        Raises:
            ConfigError: A text does not arrive, and the run is not a trial.
        """
        for name in batch.algorithm.tunes if batch.algorithm is not None else ():
            missed = self._missed.get(name, 0) if name in self._open else 0
            if not missed or (name in self._reported and missed < ENOUGH):
                continue
            self._reported.add(name)
            message = (
                f"nothing of {name!r}, which an algorithm tunes, is in any model call of the first {missed} rollouts, "
                f"so no change of it can have an effect. Give the agent's function a parameter {name}, or read "
                f"resources[{name!r}], and send its text to the model"
            )
            if missed >= ENOUGH:
                self._open.discard(name)
                if not self._is_trial:
                    raise ConfigError(message)
            _LOG.warning("%s", message)

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Return ``texts_unsent``, the number of tuned texts that no rollout has sent to a model so far."""
        count = sum(name in self._open for name in self._reported)
        return {"texts_unsent": float(count)} if count else {}


def _parts(resource: Resource) -> list[str]:
    """Return the sentences of a prompt or of a JSON value's texts, without placeholders."""
    is_prompt = isinstance(resource, PromptTemplate)
    value = resource.template if is_prompt else resource.value if isinstance(resource, JsonResource) else None
    parts = [" ".join(part.split()) for text in _strings(value) for part in _BREAKS.split(text)]
    # Single words, such as a role or a tool's name, are in many requests by chance; short values of JSON are settings.
    least = 1 if is_prompt else 3
    return [part for part in parts if part.count(" ") >= least or (is_prompt and part and not part.isascii())]


def _forms(part: str) -> tuple[str, ...]:
    """Return a text as it may be in a request: plain, or within a JSON text, escaped or not."""
    return part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]


def _text_of(recording: Recording) -> str:
    """Return all texts that a rollout's requests sent to models; ``""`` if they sent token ids or embeddings only."""
    calls = [span.call for span in recording.spans if span.call is not None and span.call.dialect != "embeddings"]
    requests = [cast("dict[str, Any]", call.request) for call in calls if hasattr(call.request, "keys")]
    sent = [request[key] for request in requests for key in _SENT & request.keys()]
    return html.unescape(" ".join(" ".join(_strings(sent)).split()))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in cast("dict[str, Any]", value).values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _strings(each)
