"""``agl learn``: runs a learner, shows what it does and why, and lets people decide."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from agl import PluginManager
from agl.acceptance import odds_text
from agl.contracts import Store
from agl.errors import ConfigError, NotFoundError
from agl.hints import count_of, did_you_mean
from agl.schemas import Record
from agl_inspect.learning import computed_again, first_unit, replay_gates, served_gates
from agl_inspect.records.learning import (
    FINAL,
    Decision,
    LearnerControl,
    LearnerState,
    LearningCandidate,
    LearningRecords,
    ReplayPair,
    ServedUnit,
    learners,
)
from agl_inspect.records.splits import HOSTED, SERVED, VARIANTS, ServedSplit, Variant
from agl_inspect.stores import MEMORY, build_store, located
from agl_inspect.terminal.opening import Reading, pass_manager, reads_store
from agl_inspect.terminal.output import echo, print_table, when
from agl_inspect.text import short, visible
from agl_run.terminal import experiment_argument, read_experiment

if TYPE_CHECKING:
    from agl_learn.settings import LearnerFile

_learner_option = click.option("--learner", metavar="NAME", help="The learner, if the store has several.")


class _FileOrCommand(click.Group):
    """A group whose first argument may also be an experiment file, which is then run."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, or ``run`` if it names a file."""
        if args and args[0] not in self.commands and (Path(args[0]).suffix or Path(args[0]).exists()):
            return "run", self.commands["run"], args
        return super().resolve_command(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write both forms."""
        formatter.write_usage(ctx.command_path, "FILE [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...")


@click.group(cls=_FileOrCommand)
def learn() -> None:
    """Learn from served conversations, next to agl serve, and promote what is shown to be better.

    FILE is an experiment file with a table [learn.NAME]. The learner works until it is stopped, and continues where it
    was when it is started again.

    Example: agl learn support.toml
    """


@learn.command("run")
@experiment_argument
@pass_manager
def run_(manager: PluginManager, file: Path, settings: tuple[str, ...]) -> None:
    """Run the learner of FILE; agl learn FILE does the same."""
    from agl_learn.service import run_learner
    from agl_learn.training import NICE
    from agl_run import settle_heap

    if sys.platform != "win32":
        os.nice(NICE)
    made = _learner_file(manager, file, settings)
    settle_heap()
    asyncio.run(_until_stopped(made.store, lambda stopping: run_learner(made, say=_say, stopping=stopping)))
    click.echo("stopped; the same command continues", err=True)


@learn.command()
@experiment_argument
@click.option("--port", type=int, default=0, help="Port of the policy's server; 0 takes any free one.")
@pass_manager
def host(manager: PluginManager, file: Path, settings: tuple[str, ...], port: int) -> None:
    """Serve the weights of the policy that the learner of FILE tunes.

    All versions that the learner needs are served at once: those of the split, and the candidate's. Start it next to
    agl serve, which gets its address as an upstream; it may be stopped and started at any time.
    """
    from agl_learn.host import run_host

    made = _learner_file(manager, file, settings)
    asyncio.run(_until_stopped(made.store, lambda stopping: run_host(made, port=port, say=_say, stopping=stopping)))


def _learner_file(manager: PluginManager, file: Path, settings: tuple[str, ...]) -> "LearnerFile":
    """Open the learner of an experiment file; raises :class:`ConfigError` for a store in memory."""
    # Imported here, because the other commands need neither training nor replays.
    from agl_learn.settings import LearnerFile
    from agl_run import learner_of

    config, plugins = read_experiment(file, settings, manager=manager)
    name, chosen = learner_of(config)
    folder = file.absolute().parent
    if config.experiment.store.startswith(MEMORY):
        raise ConfigError("a learner and its gateways share a store; set [experiment] store to a file or a server")
    store = build_store(plugins, located(config.experiment.store, folder))
    return LearnerFile(name=name, settings=chosen, config=config, folder=folder, manager=plugins, store=store)


async def _until_stopped(store: Store, work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run ``work`` until a signal arrives, and close the store."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        await work(stopping)
    finally:
        await store.close()


def _say(line: str) -> None:
    click.echo(visible(line))


class Story(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A learner with all of its candidates and decisions, as ``--json`` prints it.

    Attributes:
        progress: The evidence so far on each candidate that is on its way, by id.
    """

    name: str
    state: LearnerState
    control: LearnerControl
    split: ServedSplit | None
    variants: dict[str, Variant]
    candidates: list[LearningCandidate]
    decisions: list[Decision]
    progress: dict[str, str]


async def read_story(store: Store, name: str | None) -> Story:
    """Read a learner; raises :class:`ConfigError` if the store has none, or several and ``name`` is not given."""
    records = await _records(store, name)
    candidates = await records.candidates.read(store)
    running = [each for each in candidates.values() if each.stage not in FINAL]
    return Story(
        name=records.name,
        state=await records.state.get(store) or LearnerState(),
        control=await records.control.get(store) or LearnerControl(),
        split=await SERVED.get(store),
        variants=await VARIANTS.read(store),
        candidates=sorted(candidates.values(), key=lambda each: each.number),
        decisions=sorted((await records.decisions.read(store)).values(), key=lambda each: each.at),
        progress={each.id: await _progress(store, records, each) for each in running},
    )


async def _progress(store: Store, records: LearningRecords, candidate: LearningCandidate) -> str:
    """Return the evidence on a candidate in its present stage."""
    if candidate.stage in ("replay", "approval"):
        pairs = list((await records.pairs(candidate.id).read(store)).values())
        gate = replay_gates(candidate.rules, number=candidate.number, pairs=pairs)["replay"]
    else:
        units = list((await records.units(candidate.id).read(store)).values())
        gate = served_gates(candidate.rules, candidate.stage, units[first_unit(candidate) :])[candidate.stage]
    return f"{gate.words}; a verdict needs {1 / gate.error:,.0f} to 1"


async def _records(store: Store, name: str | None) -> LearningRecords:
    names = await learners(store)
    if not names:
        raise ConfigError("no learner has worked on this store; start one with: agl learn FILE")
    if name is None and len(names) > 1:
        raise ConfigError(f"which learner? there are {', '.join(names)}; name one with --learner")
    if name is not None and name not in names:
        raise ConfigError(f"there is no learner {name!r}; {did_you_mean(name, names, otherwise=f'there is {names}')}")
    return LearningRecords(name or names[0])


@learn.command()
@_learner_option
@reads_store
def status(store: Reading, learner: str | None) -> None:
    """Show what is served, and where the candidates are."""
    story = store.read(lambda opened: read_story(opened, learner))
    store.show(story, lambda: _status_lines(story))


def _status_lines(story: Story) -> Iterator[str]:
    state = story.state
    paused = ", paused" if story.control.is_paused else ""
    so_far = f"{count_of(state.rated, 'rated conversation')}, {count_of(state.rounds, 'round')}"
    yield f"learner {story.name}{paused}: {so_far}"
    if story.split is not None:
        for arm, share in story.split.shares.items():
            yield f"  {share:.0%} {arm}: {_named(story.split.versions[arm])}"
    for whose, own in story.variants.items():
        yield f"  {short(whose)}: {_named(own.versions)}"
    for each in story.candidates:
        if each.stage not in FINAL:
            yield f"{each.id} ({_named(each.versions)}) {each.stage}: {each.moves[-1].reason}"
            yield f"  {story.progress[each.id]}"
    final = [each for each in story.candidates if each.stage in FINAL]
    ends = ", ".join(f"{sum(each.stage == end for each in final)} {end}" for end in sorted(FINAL))
    yield f"{count_of(len(story.candidates), 'candidate')}: {ends}"
    for user, reason in state.excluded.items():
        yield f"feedback that does not count: {short(user)} ({reason})"


@learn.command()
@_learner_option
@reads_store
def log(store: Reading, learner: str | None) -> None:
    """List every move of every candidate, oldest first."""
    story = store.read(lambda opened: read_story(opened, learner))
    moves = sorted(((each.at, one.id, each) for one in story.candidates for each in one.moves), key=lambda row: row[0])
    if store.as_json:
        store.show(story, lambda: ())
        return
    rows = [(when(at), who, each.stage, f"{each.share:.0%}", each.reason) for at, who, each in moves]
    print_table(("time", "candidate", "stage", "share", "reason"), rows, whole=("candidate", "stage"))
    if story.candidates:
        rules, number = story.candidates[-1].rules, story.state.candidates
        echo(f"error of the run {rules.error:g}; {count_of(number, 'candidate')} so far, each with a part of it")


@learn.command()
@click.argument("version")
@_learner_option
@reads_store
def why(store: Reading, version: str, learner: str | None) -> None:
    """Explain what happened to VERSION, with the evidence.

    VERSION is a candidate's id, or a version that it proposed.
    """
    story = store.read(lambda opened: read_story(opened, learner))
    found = next((each for each in story.candidates[::-1] if version in (each.id, *each.versions.values())), None)
    if found is None:
        raise NotFoundError("candidate", version, "agl learn log lists the candidates")
    decisions = [each for each in story.decisions if each.candidate == found.id]
    store.show({"candidate": found, "decisions": decisions}, lambda: _why_lines(found, decisions))


def _why_lines(candidate: LearningCandidate, decisions: Sequence[Decision]) -> Iterator[str]:
    yield f"{candidate.id}: {_named(candidate.versions)} instead of {_named(candidate.baseline)}, by {candidate.origin}"
    yield f"  proposed {when(candidate.created_at)}, after {count_of(candidate.conversations, 'rated conversation')}"
    for each in candidate.moves:
        share = f" at {each.share:.0%}" if 0 < each.share < 1 else ""
        yield f"  {when(each.at)} {each.stage}{share}: {each.reason}"
    for each in decisions:
        yield f"  {each.id}: {_decision_words(each)}"


def _decision_words(each: Decision) -> str:
    gain = f"gain {each.mean:+.3f}, from {each.lower:+.3f} to {each.upper:+.3f}"
    odds = f"{odds_text(each.evidence)} for better, {odds_text(each.evidence_of_harm)} for worse"
    return f"{each.verdict}: {odds}, {1 / each.error:,.0f} to 1 needed; {gain}; {count_of(each.count, 'observation')}"


@learn.command()
@click.argument("decision")
@_learner_option
@reads_store
def replay(store: Reading, decision: str, learner: str | None) -> None:
    """Compute DECISION again from its recorded observations.

    The exit status is 1 if the result differs from what was decided.
    """
    old, new = store.read(lambda opened: _again(opened, decision, learner))
    if (old.evidence, old.evidence_of_harm, old.verdict) != (new.evidence, new.evidence_of_harm, new.verdict):
        raise ConfigError(
            f"{decision} cannot be confirmed: it was {_decision_words(old)}, and the observations in the store give "
            f"{_decision_words(new)}; they were changed since"
        )
    store.show(new, lambda: [f"{decision}: {_decision_words(new)}", "the same as decided, to the last digit"])


async def _again(store: Store, identity: str, name: str | None) -> tuple[Decision, Decision]:
    records = await _records(store, name)
    decisions = await records.decisions.read(store)
    if identity not in decisions:
        hint = did_you_mean(identity, decisions, otherwise="agl learn why CANDIDATE lists them")
        raise NotFoundError("decision", identity, hint)
    old = decisions[identity]
    candidate = (await records.candidates.read(store))[old.candidate]
    pairs: list[ReplayPair] = list((await records.pairs(old.candidate).read(store)).values())
    units: list[ServedUnit] = list((await records.units(old.candidate).read(store)).values())
    gate = computed_again(old, candidate, pairs, units)
    again = {"evidence": gate.evidence, "evidence_of_harm": gate.evidence_of_harm, "verdict": gate.verdict}
    return old, replace(old, **again, mean=gate.mean, lower=gate.lower, upper=gate.upper)


@learn.command()
@click.argument("candidate")
@_learner_option
@reads_store
def approve(store: Reading, candidate: str, learner: str | None) -> None:
    """Let CANDIDATE begin its canary."""
    made = _wish(store, learner, lambda wish: replace(wish, approved=[*wish.approved, candidate]), candidate)
    store.show(made, lambda: [f"{candidate} may begin its canary"])


@learn.command()
@click.argument("candidate")
@click.option("--reason", default="no reason given", help="Reason to record.")
@_learner_option
@reads_store
def reject(store: Reading, candidate: str, reason: str, learner: str | None) -> None:
    """Withdraw CANDIDATE, or roll it back after its promotion."""
    made = _wish(store, learner, lambda wish: replace(wish, rejected={**wish.rejected, candidate: reason}), candidate)
    store.show(made, lambda: [f"{candidate} is rejected"])


@learn.command()
@_learner_option
@reads_store
def end(store: Reading, learner: str | None) -> None:
    """Stop serving the split of a learner that has stopped.

    Gateways then choose no versions, as before the learner; the labels stay where they are. If the learner is started
    again, a replay goes on, and a canary is withdrawn. A split with weights can be ended once agl learn host, whose
    untrained weights would answer, has stopped.
    """

    async def work(opened: Store) -> str:
        records = await _records(opened, learner)
        if await opened.presences(f"learner-{records.name}"):
            raise ConfigError(f"the learner {records.name!r} runs, or was killed in the last seconds; stop it first")
        hosts = await HOSTED.read(opened)
        for name in hosts:
            if await opened.presences(f"host-{name}"):
                raise ConfigError(
                    f"the untrained weights of {name!r} would answer from now on; let a server of your own serve the "
                    "trained ones, and stop agl learn host first"
                )
        ended = SERVED.states({"": ServedSplit(shares={}, versions={})}) | HOSTED.states(hosts)
        await opened.save_state(dict.fromkeys(ended, b""))
        return records.name

    name = store.read(work)
    store.show({"learner": name}, lambda: [f"the split of {name} is not served any more"])


@learn.command()
@_learner_option
@reads_store
def pause(store: Reading, learner: str | None) -> None:
    """Hold new candidates and growing shares.

    Evidence of harm still counts.
    """
    made = _wish(store, learner, lambda wish: replace(wish, is_paused=True))
    store.show(made, lambda: ["paused; to go on: agl learn resume"])


@learn.command()
@_learner_option
@reads_store
def resume(store: Reading, learner: str | None) -> None:
    """Go on after a pause."""
    made = _wish(store, learner, lambda wish: replace(wish, is_paused=False))
    store.show(made, lambda: ["the learner goes on"])


def _wish(
    store: Reading, learner: str | None, change: Callable[[LearnerControl], LearnerControl], candidate: str = ""
) -> LearnerControl:
    """Change what people ask of the learner."""

    async def work(opened: Store) -> LearnerControl:
        records = await _records(opened, learner)
        if candidate:
            known = await records.candidates.read(opened)
            if candidate not in known:
                raise NotFoundError(
                    "candidate", candidate, did_you_mean(candidate, known, otherwise="see: agl learn log")
                )
            stage = known[candidate].stage
            if stage in FINAL:
                raise ConfigError(f"{candidate} has ended already: it is {stage}")
        control = await records.control.get(opened) or LearnerControl()
        made = change(control)
        await records.control.add(opened, {"": made})
        return made

    return store.read(work)


def _named(versions: dict[str, str]) -> str:
    return ", ".join(f"{name}@{version}" for name, version in versions.items())
