"""Parts of the engine for packages that run rollouts in other ways: replays, trials, other front ends."""

from agl_run.config.dataset import as_tasks, check_hidden, load_dataset
from agl_run.display.progress import default_progress
from agl_run.display.result_text import describe_episode
from agl_run.messages import value_for_agent
from agl_run.parts.build import build_rewards
from agl_run.parts.counterfactual import can_replay
from agl_run.parts.models import policy_params
from agl_run.parts.rewards import check_known, named
from agl_run.plan import Plan, placeholder_keys
from agl_run.run.blocking import run_blocking
from agl_run.run.collector import Collector, cancel_unfinished
from agl_run.run.driver import Driver
from agl_run.run.episodes import read_finished, score_options
from agl_run.run.session import open_store, store_url_of
from agl_run.run.trainer import Trainer
from agl_run.run.trial import reached, trial
from agl_run.runners.judging import rewards_of
from agl_run.runners.recording import record_command
from agl_run.runners.repeats import kind_of
from agl_run.watch.failures import MOST_FREQUENT
from agl_run.worker.setup import ALWAYS_ON

__all__ = [
    "ALWAYS_ON",
    "MOST_FREQUENT",
    "Collector",
    "Driver",
    "Plan",
    "Trainer",
    "as_tasks",
    "build_rewards",
    "can_replay",
    "cancel_unfinished",
    "check_hidden",
    "check_known",
    "default_progress",
    "describe_episode",
    "kind_of",
    "load_dataset",
    "named",
    "open_store",
    "placeholder_keys",
    "policy_params",
    "reached",
    "read_finished",
    "record_command",
    "rewards_of",
    "run_blocking",
    "score_options",
    "store_url_of",
    "trial",
    "value_for_agent",
]
