"""``agl replay --fork``: run a recorded rollout again as it was up to one call, and anew from there, several times.

Calls before the chosen one get their recorded answers; the experiment's policies answer the chosen call and all later
ones. So the mean reward of the forks is the reward that the run could expect before the chosen call. Tools run again,
because no tracer can answer in their place; if a new result changes a request before the chosen call, the fork has
diverged.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from agl import PluginManager
from agl.contracts import ForkPlan, Store
from agl.dialects import call_messages
from agl.episodes import episode_reward
from agl.errors import AglError, ConfigError
from agl.hints import count_of
from agl.schemas import Record, Rollout, Span
from agl.stores import all_spans
from agl_inspect.records.names import FORKS, PROMPT_TRIAL, TRIAL
from agl_inspect.rollouts.answers import RecordedAnswer, asked, recorded_answers
from agl_inspect.rollouts.conversations import ending, labelled_texts
from agl_inspect.stores import command, located
from agl_inspect.terminal.opening import complete_rollout, pass_manager, resolve_url, store_option, with_store
from agl_inspect.terminal.output import STOPPED, echo, json_option, print_json, print_table
from agl_inspect.terminal.query import find
from agl_inspect.text import short, visible
from agl_replay.forking import MOST, Forked, ForkReport, describe_fork, fork_rollout, judged
from agl_run import load_config
from agl_run.engine import Plan, can_replay, default_progress, run_blocking
from agl_run.terminal import make_trainer, store_of

SUFFIX = "-replay"
"""Suffix of the experiment name under which replays are recorded."""


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """The rollout to fork, with its calls in order of time."""

    rollout: Rollout
    calls: Sequence[RecordedAnswer]
    spans: Sequence[Span]


class ForkPoint(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A call to fork at.

    Attributes:
        call: The number of the call, from 1.
        asked: The last message of the call's request.
        answered: The recorded answer.
    """

    call: int
    span_id: str
    agent: str
    asked: str
    answered: str


@click.command("fork")
@click.argument("rollout_id", shell_complete=complete_rollout)
@click.option("--at", "number", type=click.IntRange(min=1), help="Call to fork at; without it, list the calls.")
@click.option("--n", "count", type=click.IntRange(1, MOST), default=10, show_default=True, help="Number of forks.")
@click.option(
    "--file", type=click.Path(path_type=Path), help="The experiment file; by default found by name in this folder."
)
@store_option
@json_option
@pass_manager
def fork(
    manager: PluginManager,
    rollout_id: str,
    number: int | None,
    count: int,
    file: Path | None,
    store_url: str | None,
    as_json: bool,
) -> None:
    """Run ROLLOUT_ID again with its recorded answers up to one call, and with new answers from there.

    A unique beginning of an id is enough; "latest" is the newest rollout. Calls before --at get their recorded answers,
    that call and later ones ask the experiment's models. A fork whose calls are not the recorded ones has diverged: it
    fails and is not scored. The exit status is 1 when no fork got a reward.
    """
    url = store_of(load_config(file), file) if file is not None and not store_url else resolve_url(store_url)
    recorded = with_store(manager, url, lambda store: _load(store, rollout_id))
    if number is None:
        _list(_points(recorded), as_json=as_json)
        return
    call = _call(recorded, number)
    plan = _plan(manager, file or _file_of(recorded.rollout), url)
    forked = _run(plan, recorded, ForkPlan(rollout_id=recorded.rollout.rollout_id, span_id=call.span_ids[0]), count)
    if not forked.episodes:
        click.echo("stopped before a fork ended; there is nothing to report", err=True)
        sys.exit(STOPPED)
    report = judged(
        ForkReport(
            rollout_id=recorded.rollout.rollout_id,
            call=number,
            calls=len(recorded.calls),
            span_id=call.span_ids[0],
            agent=call.agent,
            reward=_reward(recorded, plan),
            is_complete=forked.is_complete,
            forks=[describe_fork(episode) for episode in forked.episodes],
        )
    )
    if as_json:
        print_json(report)
    else:
        _print_forks(report)
        echo(f"look at a fork with: {command('show', report.forks[0].rollout_id, store_url=url)}")
    if not report.is_complete:
        sys.exit(STOPPED)
    sys.exit(0 if report.mean is not None else 1)


async def _load(store: Store, rollout_id: str) -> _Recorded:
    rollout = await find(store, rollout_id)
    if not rollout.is_finished:
        raise ConfigError(f"the rollout {rollout.rollout_id} is still {rollout.status}; fork it once it has ended")
    spans = await all_spans(store, rollout.rollout_id)
    calls = recorded_answers(spans)
    if not calls:
        raise ConfigError(
            f"the rollout {rollout.rollout_id} has no model call with a complete answer, so there is nothing to fork "
            f"at; agl show {rollout.rollout_id} shows the recording"
        )
    return _Recorded(rollout=rollout, calls=calls, spans=spans)


def _reward(recorded: _Recorded, plan: Plan) -> float | None:
    """Return the recorded reward, computed by the same rules as the rewards of the forks."""
    section = plan.config.experiment
    return episode_reward(recorded.spans, weights=section.reward_weights, trust_agent=section.trust_agent_rewards)


def _call(recorded: _Recorded, number: int) -> RecordedAnswer:
    if number > len(recorded.calls):
        raise ConfigError(
            f"--at {number} is beyond the last model call ({len(recorded.calls)}) of {recorded.rollout.rollout_id}; "
            f"agl replay --fork {recorded.rollout.rollout_id} lists them"
        )
    return recorded.calls[number - 1]


def _points(recorded: _Recorded) -> list[ForkPoint]:
    of_span = {span.span_id: span for span in recorded.spans}
    return [
        ForkPoint(
            call=number,
            span_id=call.span_ids[0],
            agent=call.agent,
            asked=ending(asked(call.dialect, call.request)),
            answered=_answer(of_span[call.span_ids[0]]),
        )
        for number, call in enumerate(recorded.calls, start=1)
    ]


def _answer(span: Span) -> str:
    messages = call_messages(span.call) if span.call is not None else []
    return ", ".join(text for _, text in labelled_texts(messages[-1])) if messages else ""


def _list(points: Sequence[ForkPoint], *, as_json: bool) -> None:
    """Print the calls with the numbers that ``--at`` takes."""
    if as_json:
        print_json(points)
        return
    rows = [
        (
            str(point.call),
            point.agent or "-",
            short(point.asked, 80),
            short(point.answered, 60) or "-",
        )
        for point in points
    ]
    print_table(("call", "agent", "asked", "answered"), rows)


def _file_of(rollout: Rollout) -> Path:
    """Return the experiment file of a rollout: the only one of its name in the working folder."""
    if rollout.experiment.startswith("exec-"):
        raise ConfigError(
            f"agl exec recorded {rollout.rollout_id}, and a fork answers calls in the agent's own process, which a "
            "command does not run in. Fork a rollout of an experiment; agl replay runs the command again as it was"
        )
    found = [path for path in sorted(Path().glob("*.toml")) if _name_in(path) in _origins(rollout.experiment)]
    if len(found) == 1:
        return found[0]
    several = f"several files here describe it: {', '.join(map(str, found))}" if found else "no file here describes it"
    raise ConfigError(
        f"the rollout {rollout.rollout_id} belongs to the experiment {rollout.experiment!r}, and {several}; name its "
        f"file: agl replay --fork {rollout.rollout_id} --file FILE"
    )


def _name_in(path: Path) -> str:
    try:
        return load_config(path).experiment.name
    except AglError:  # not an experiment file
        return ""


def _origins(experiment: str) -> set[str]:
    """Return the possible names, in an experiment file, of the experiment that is recorded as ``experiment``."""
    return {experiment, *(experiment.removesuffix(suffix) for suffix in (TRIAL, PROMPT_TRIAL, SUFFIX, FORKS))}


def _plan(manager: PluginManager, file: Path, url: str) -> Plan:
    store = located(url, Path.cwd())
    plan = make_trainer(file, (f"experiment.store={store}",), manager=manager).plan()
    if not can_replay(plan):
        raise ConfigError(
            f"a fork answers the agent's model calls in its own process, which the {plan.config.runner.use!r} runner "
            "cannot do; use the 'async' or the 'process' runner"
        )
    return plan


def _run(plan: Plan, recorded: _Recorded, fork: ForkPlan, count: int) -> Forked:
    """Run the forks, and return the results; after an interrupt, the results so far."""
    forked = Forked()
    progress = default_progress(on_errors=True)
    try:
        run_blocking(lambda: fork_rollout(plan, recorded.rollout, fork, n=count, progress=progress, found=forked))
    except KeyboardInterrupt:
        click.echo(visible("\nstopped; done so far:"), err=True)
    return forked


def _print_forks(report: ForkReport) -> None:
    """Print the forks as a table, the errors of those that failed, the mean and the verdict."""
    by = f" by {report.agent}" if report.agent else ""
    echo(f"{report.rollout_id} from call {report.call} of {report.calls}{by} on; recorded {_words(report.reward)}")
    rows = [
        (
            fork.rollout_id,
            "diverged" if fork.is_diverged else fork.status,
            "-" if fork.reward is None else f"{fork.reward:g}",
            str(fork.replayed_calls),
            str(fork.model_calls),
        )
        for fork in report.forks
    ]
    print_table(("fork", "status", "reward", "replayed", "model calls"), rows)
    for error, count in Counter(fork.error for fork in report.forks if fork.error).items():
        echo(f"{count} of {len(report.forks)}: {short(error, 600)}")
    if report.mean is not None:
        count = sum(fork.reward is not None for fork in report.forks)
        echo(f"mean reward {report.mean:.3g}, {count_of(count, 'fork')}; recorded {_words(report.reward)}")
    echo(report.verdict)
    if not report.is_complete:
        echo("stopped before all forks had ended")


def _words(value: float | None) -> str:
    return "no reward" if value is None else f"reward {value:g}"
