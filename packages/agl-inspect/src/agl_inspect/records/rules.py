"""Reads the rules by which an experiment counts rewards and calls, as the states of its algorithms keep them.

They are for commands that are given no experiment file. The usual rules stand for an experiment without a step, which
has kept none.
"""

from collections.abc import Mapping

import msgspec

from agl.contracts import Store
from agl.episodes import EpisodeOptions, ScoreOptions, Verdict
from agl_inspect.records.names import FORKS, PROMPT_TRIAL, TRIAL
from agl_inspect.records.state import load_experiment, load_settings

_SECTION = ".experiment."
_WEIGHTS = "reward_weights."


async def rules_of(store: Store, experiment: str) -> EpisodeOptions:
    """Return the rules of an experiment by its last steps; those of its trials and forks are the same."""
    origins = [experiment.removesuffix(suffix) for suffix in (TRIAL, PROMPT_TRIAL, FORKS)]
    for name in dict.fromkeys([experiment, *origins]):
        record = await load_experiment(store, name) if name else None
        if record is not None:
            return _rules(await load_settings(store, record))
    return EpisodeOptions()


def _rules(settings: Mapping[str, str]) -> EpisodeOptions:
    """Return the rules that settings hold, which are JSON by ``ALGORITHM.experiment.KEY``."""
    section = {key.partition(_SECTION)[2]: text for key, text in settings.items() if _SECTION in key}
    weights = {key.removeprefix(_WEIGHTS): text for key, text in section.items() if key.startswith(_WEIGHTS)}
    return EpisodeOptions(
        score=ScoreOptions(
            weights={name: msgspec.json.decode(text, type=float) for name, text in weights.items()},
            trust_agent=section.get("trust_agent_rewards") == "true",
        ),
        unseen=_verdict(section.get("unseen_calls"), otherwise=EpisodeOptions().unseen),
        unattributed=_verdict(section.get("unattributed_calls"), otherwise=EpisodeOptions().unattributed),
    )


def _verdict(text: str | None, *, otherwise: Verdict) -> Verdict:
    if text is None:
        return otherwise
    return "accept" if text == '"accept"' else "drop"
