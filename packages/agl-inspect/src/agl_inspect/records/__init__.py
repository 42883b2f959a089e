"""Records that an experiment keeps in the store: states, labels, validations, trials, metrics."""

from agl_inspect.records.hosts import OWNER, place, worker_is_dead, worker_name
from agl_inspect.records.labels import LABEL, label_path, labelled, move, move_back
from agl_inspect.records.metrics import place_of
from agl_inspect.records.names import FORKS, MAX_NAME, NAME, ORIGIN, PROMPT_TRIAL, TRIAL
from agl_inspect.records.rollouts import broke_in_reward, error_of, group_id_of, id_prefix, run_of, step_name
from agl_inspect.records.saved_versions import DEFERRED, deferred, saved_marks
from agl_inspect.records.sources import PREFIX, FinishedRollouts, experiment_of, finished
from agl_inspect.records.state import (
    AlgorithmState,
    last_versions,
    load_algorithm,
    load_experiment,
    load_last_versions,
    load_settings,
    run_key,
    save_progress,
    trained_rollouts,
)
from agl_inspect.records.step_lines import step_line, version_of_step
from agl_inspect.records.trials import KeptTrial, TrialScore, keep_trial, read_trials
from agl_inspect.records.validations import (
    FEWEST_TASKS,
    Validation,
    Validations,
    after_step,
    digest_of,
    failures_of,
    files_of,
    has_fallen,
    is_below,
    rewards_of,
)
from agl_inspect.records.workers import ListedWorker, list_workers

__all__ = [
    "DEFERRED",
    "FEWEST_TASKS",
    "FORKS",
    "LABEL",
    "MAX_NAME",
    "NAME",
    "ORIGIN",
    "OWNER",
    "PREFIX",
    "PROMPT_TRIAL",
    "TRIAL",
    "AlgorithmState",
    "FinishedRollouts",
    "KeptTrial",
    "ListedWorker",
    "TrialScore",
    "Validation",
    "Validations",
    "after_step",
    "broke_in_reward",
    "deferred",
    "digest_of",
    "error_of",
    "experiment_of",
    "failures_of",
    "files_of",
    "finished",
    "group_id_of",
    "has_fallen",
    "id_prefix",
    "is_below",
    "keep_trial",
    "label_path",
    "labelled",
    "last_versions",
    "list_workers",
    "load_algorithm",
    "load_experiment",
    "load_last_versions",
    "load_settings",
    "move",
    "move_back",
    "place",
    "place_of",
    "read_trials",
    "rewards_of",
    "run_key",
    "run_of",
    "save_progress",
    "saved_marks",
    "step_line",
    "step_name",
    "trained_rollouts",
    "version_of_step",
    "worker_is_dead",
    "worker_name",
]
