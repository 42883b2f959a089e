"""Counts training calls that requested less than the policy's full distribution, and reports each kind once.

The gateway, or without one the wire hook, overrides or keeps the requested parameters and notes this on the call's
span. So the calls of workers on other machines are counted as well.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from agl import semconv
from agl.contracts import CallUse, Recording
from agl.errors import ConfigError
from agl.schemas import Span
from agl_inspect.stores import proposal
from agl_run.config.sections import PolicyConfig
from agl_run.watch.observers import Observer

_LOG = logging.getLogger("agl_run.run")

_METRICS = {
    semconv.SAMPLING_OVERRIDDEN: "calls_sampling_overridden",
    semconv.SAMPLING_KEPT: "calls_sampling_kept",
}

_MESSAGES = {
    semconv.SAMPLING_OVERRIDDEN: "in training the policy samples from the full distribution (at temperature 1 where it "
    "is 0, which draws nothing), because the gradient would be biased otherwise; validation samples as the agent "
    'asks. [policy.%s] sampling = "refuse" refuses such calls, and "keep" lets them pass',
    semconv.SAMPLING_KEPT: "its policy draws from a part of its distribution then; nothing recorded can correct the "
    "gradient for that, and it is biased. The calls are marked and counted. Leave the parameter out while training, "
    'or let [policy.%s] sampling be "override", which changes all but constraints on the form of the answer',
}


class SamplingReport(Observer):
    """Counts training calls with narrowed sampling, by algorithm; ``store_url`` is for the commands in the reports."""

    def __init__(self, *, store_url: str = "") -> None:
        self._store_url = store_url
        self._counts: dict[str, Counter[str]] = {}
        self._logged: set[tuple[str, str, str]] = set()
        self._total: Counter[str] = Counter()

    def rollout(self, caller: str, recording: Recording) -> None:
        """Count a rollout's calls with overridden or kept sampling parameters, and log each parameter once."""
        for span in recording.spans:
            # A call may have had one parameter overridden and another one kept.
            for attribute in span.attributes.keys() & _METRICS.keys():
                self._counts.setdefault(caller, Counter())[_METRICS[attribute]] += 1
                self._total[attribute] += 1
                self._log_new(attribute, span)

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Return an algorithm's counts since its last step; counts of zero are left out."""
        # Popped, so that each step reports its own calls.
        return {name: float(count) for name, count in self._counts.pop(caller, Counter()).items()}

    def end(self) -> None:
        """Log the counts of the whole run, if any call was counted."""
        if self._total:
            overridden, kept = (self._total[name] for name in (semconv.SAMPLING_OVERRIDDEN, semconv.SAMPLING_KEPT))
            _LOG.warning(
                "parameters of sampling were overridden in %d training calls, and kept with a biased gradient in %d",
                overridden,
                kept,
            )

    def _log_new(self, attribute: str, span: Span) -> None:
        asked = cast("list[str]", span.attributes[attribute])
        policy = span.call.policy if span.call else ""
        # By parameter and not by value: an agent that varies its temperature is reported once.
        new = [text for text in asked if (policy, attribute, text.split(" ")[0]) not in self._logged]
        self._logged.update((policy, attribute, text.split(" ")[0]) for text in new)
        if new:
            see = proposal("See", "show", span.rollout_id, store_url=self._store_url)
            _LOG.warning("the agent asks for %s; %s.%s", ", ".join(new), _MESSAGES[attribute] % policy, see)


def check_rules(policies: Mapping[str, PolicyConfig], *, trained: Iterable[str]) -> None:
    """Raise :class:`ConfigError` if ``sampling`` is set on a policy that no algorithm trains."""
    ignored = [name for name, given in policies.items() if given.sampling != "override" and name not in set(trained)]
    if ignored:
        name = ignored[0]
        raise ConfigError(
            f"policy.{name}.sampling is {policies[name].sampling!r}, and no algorithm tunes {name!r}: only rollouts "
            "that train a policy sample otherwise than the agent asks; remove it"
        )
