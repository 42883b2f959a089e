"""Ends a run that tunes a text which appears in no model call, because such a search would be in vain."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any, cast

from agl.contracts import Recording
from agl.errors import ConfigError
from agl.schemas import JsonResource, PromptTemplate, Resource
from agl_run.plan import Plan
from agl_run.watch.observers import Batch, Observer
from agl_run.worker.current import LiveResources

_LOG = logging.getLogger("agl_run.run")

_BREAKS = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{[^{}]*\}|\n|(?<=[.:]) ")
"""A regular expression for the separators in a tuned text: placeholders, line ends, and ends of sentences."""


class ArrivalReport(Observer):
    """Searches the requests of the first rollouts for the texts that algorithms tune.

    One sentence of a text is enough, since agents may use a part of it or put it into another form. Values without
    sentences, such as numbers, are not judged, and neither are rollouts without a recorded request.

    Args:
        plan: The experiment.
        live: The live versions of the experiment's resources.
        is_trial: If true, a text that does not arrive is only reported.
    """

    def __init__(self, plan: Plan, *, live: LiveResources, is_trial: bool = False) -> None:
        self._live, self._is_trial = live, is_trial
        self._open = {name for one in plan.config.algorithm for name in one.tunes} - set(plan.config.policy)
        self._missed = dict.fromkeys(self._open, 0)

    def rollout(self, caller: str, recording: Recording) -> None:
        """Search a rollout's requests for the texts that have not been found yet."""
        if not self._open:
            return
        requests = [span.call.request for span in recording.spans if span.call is not None and span.call.request]
        text = " ".join(" ".join(_strings(requests)).split())
        for name in list(self._open) if text else ():
            version = self._live.current(name)
            parts = _parts(version.resource)
            # Only the live version is at hand; rollouts of a candidate are judged by those of the version it came from.
            if not parts or recording.rollout.resources.get(name) != version.version:
                continue
            # Inside of a JSON text a part is escaped.
            if any(part in text or json.dumps(part)[1:-1] in text for part in parts):
                self._open.discard(name)
            else:
                self._missed[name] += 1

    def batch(self, batch: Batch) -> None:
        """End the run if the algorithm tunes a text that was in none of the requests so far.

        Raises:
            ConfigError: A text does not arrive, and the run is not a trial.
        """
        for name in batch.algorithm.tunes if batch.algorithm is not None else ():
            if name in self._open and self._missed[name]:
                self._open.discard(name)
                message = (
                    f"nothing of {name!r}, which an algorithm tunes, is in any model call of the first "
                    f"{self._missed[name]} rollouts, so no change of it can have an effect. Give the agent's "
                    f"function a parameter {name}, or read resources[{name!r}], and send its text to the model"
                )
                if not self._is_trial:
                    raise ConfigError(message)
                _LOG.warning("%s", message)


def _parts(resource: Resource) -> list[str]:
    """Return the sentences of a prompt, or of all texts in a JSON value, without placeholders."""
    value = resource.template if isinstance(resource, PromptTemplate) else None
    value = resource.value if isinstance(resource, JsonResource) else value
    parts = [" ".join(part.split()) for text in _strings(value) for part in _BREAKS.split(text)]
    # Single words, such as a role or a tool's name, are in many requests by chance.
    return [part for part in parts if " " in part or (part and not part.isascii())]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in cast("dict[str, Any]", value).values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from _strings(each)
