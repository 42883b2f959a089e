"""Training in the background: runs the algorithms of the file on conversations, and checks what they propose.

A round of training is an experiment of its own, ``NAME-learn-ROUND``, in the same store. It begins with the served
versions and ends with the best ones that it found. The tasks are saved with the experiment's record before anything
runs, so that a round that was killed continues where it stopped, with the same tasks.

The round runs in a process of its own with a lower priority, so that it takes no time from a gateway on the same
machine. The process ends with the learner. A ``memory://`` store belongs to one process, and a round on it runs there.

The words of a judge never reach an optimiser: it would learn to please the judge.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from agl.algorithms import AlgorithmConfig, ComponentConfig
from agl.contracts import ExperimentRecord
from agl.errors import AglError, ConfigError, NotFoundError, RunError, StoreError
from agl.schemas import Json, Record, Resource, Weights, to_json
from agl_inspect.records.learning import LearningRound, entry_name
from agl_inspect.records.names import ROUND
from agl_inspect.records.state import load_experiment
from agl_learn.contracts import Conversation, Proposal
from agl_learn.settings import LearnerFile
from agl_run import ExperimentConfig, Quiet, Trainer, settle_heap
from agl_run.engine import TextResource, fit_plan, text_of, with_text

_LOG = logging.getLogger("agl_learn")

NICE = 10
"""How much a learner lowers its priority, and training once more: the gateway on the same machine comes first."""

_AUTOGROUP = Path("/proc/self/autogroup")
"""Where Linux, which may share the processor between sessions first, keeps the priority of a process's session."""

END_S = 10.0
"""Seconds that a training process may take to save its state when the learner stops."""

LONGEST = 4_000
"""A proposed text may have this many characters, or ``GROWTH`` times those of the served text if that is more."""

GROWTH = 4

SEARCHES = ("apo", "gepa", "random")
"""The prompt searches, which publish only what they have proven."""

PASSAGE = 24
"""The fewest characters of a line that counts as quoted; shorter lines may be alike by chance."""

VALIDATION = 32
"""The most validation tasks of a round: enough to choose a candidate, about which a replay decides."""

_LAST_WORDS = 2_000
"""A message quotes at most this many characters from the end of a log."""


class TrainerProposer:
    """Runs the algorithms that tune the learner's resources; see :class:`~agl_learn.contracts.Proposer`."""

    def __init__(self, file: LearnerFile) -> None:
        self._file = file
        self._algorithms = [each for each in file.config.algorithm if _tunes(each, file.settings.tunes)]
        self._learned = ""

    async def propose(
        self, train: Sequence[Conversation], *, live: Mapping[str, str], number: int
    ) -> Sequence[Proposal]:
        """Run round ``number`` to its end, and return the versions that it found; an error ends the round."""
        name = f"{self._file.name}{ROUND}{number}"
        self._learned = "\n".join(text for each in train for text in _words(each))
        try:
            tasks = await self._begin(name, number, train, live=live)
            await self._train(name, tasks)
            return await self._found(name, live=live)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - algorithms and agents may raise anything, and the learner goes on
            _LOG.warning("round %d of training ended: %s", number, error, exc_info=not isinstance(error, AglError))
            return []

    async def refusal(self, proposal: Proposal, *, live: Mapping[str, str], held_out: Sequence[Conversation]) -> str:
        """Return why a proposal may not be tried; ``""`` if it may."""
        for name, version in proposal.versions.items():
            if name not in self._file.settings.tunes:
                return f"{name} is not among the resources that [learn.{self._file.name}] tunes"
            try:
                new = (await self._file.store.resource(name, version)).resource
            except NotFoundError:
                return f"{name}@{version} is not in the store"
            old = (await self._file.store.resource(name, live[name])).resource
            if reason := _refusal_of(new, old) or self._quotation(new, old, held_out):
                return f"{name}@{version}: {reason}"
        return ""

    async def _begin(
        self, name: str, number: int, train: Sequence[Conversation], *, live: Mapping[str, str]
    ) -> LearningRound:
        """Return the tasks of the round, which are saved when it begins for the first time."""
        shelf, store = self._file.records.rounds, self._file.store
        if known := await shelf.get(store, entry_name(number)):
            return known
        tasks = round_tasks(train, by=self._file.settings.unit)
        record = ExperimentRecord(name=name, live=dict(live))
        await store.save_state(shelf.states({entry_name(number): tasks}), experiment=record)
        return tasks

    async def _train(self, name: str, tasks: LearningRound) -> None:
        store = self._file.store
        record = await load_experiment(store, name)
        if record is not None and record.status == "finished":
            return
        config = self._file.experiment(name, algorithms=list(map(_without_proof, self._algorithms)))
        config = msgspec.structs.replace(config, reward=tuple(map(without_words, config.reward)))
        if config.experiment.store.startswith("memory:"):
            plan = self._file.plan(config, train=tasks.train, val=tasks.val)
            await fit_plan(plan, progress=Quiet(), resume=True, fresh=False)
        else:
            await self._train_apart(_Job(config=config, folder=str(self._file.folder), tasks=tasks))

    async def _train_apart(self, job: "_Job") -> None:
        """Train in another process; raises :class:`RunError`, which quotes the end of its log, if it fails."""
        section = job.config.experiment
        log = self._file.folder / section.workdir / section.name / "training.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agl_learn.training"),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._file.manager.worker_env()},
                start_new_session=True,  # a Ctrl-C in the terminal reaches only the learner
            )
        try:
            code = await _work(process, job)
        finally:
            await _stop(process)
        if code:
            said = log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:].strip().splitlines()
            raise RunError(f"{said[-1] if said else f'the process ended with {code}'} ({log})")

    async def _found(self, name: str, *, live: Mapping[str, str]) -> Sequence[Proposal]:
        store = self._file.store
        record = await load_experiment(store, name)
        if record is None or record.status != "finished":
            raise RunError(f"{name} did not finish")
        found: dict[str, str] = {}
        for resource in self._file.settings.tunes:
            version = record.live[resource]
            versions = [(await store.resource(resource, each)).resource for each in (version, live[resource])]
            if versions[0] != versions[1]:
                found[resource] = version
        origin = " and ".join(dict.fromkeys(each.use for each in self._algorithms))
        return [Proposal(versions=found, origin=origin)] if found else []

    def _quotation(self, new: Resource, old: Resource, held_out: Sequence[Conversation]) -> str:
        """Return why a text may not be tried that quotes a judge or a held-out conversation."""
        if not isinstance(new, TextResource) or not isinstance(old, TextResource):
            return ""
        text, known = text_of(new), text_of(old)
        judged = (line for each in self._file.config.reward for line in _judge_lines(each.use, each.params))
        said = (line for each in held_out for line in _words(each) if line not in self._learned)
        for kind, lines in (("the judge", judged), ("a held-out conversation", said)):
            for line in lines:
                if len(line) >= PASSAGE and line in text and line not in known:
                    return f"it quotes {kind}: {line[:80]!r}"
        return ""


def round_tasks(conversations: Sequence[Conversation], *, by: Literal["user", "conversation"]) -> LearningRound:
    """Split conversations into different tasks for training and validation.

    Every third unit is for validation, without the tasks that also others have. If that leaves none, every third task
    is; a single task serves for both.
    """
    units = list(dict.fromkeys(each.unit(by) for each in conversations))
    kept = set(units[1::3])
    train = {to_json(each.task): each.task for each in conversations if each.unit(by) not in kept}
    others = {to_json(each.task): each.task for each in conversations if each.unit(by) in kept}
    val = {key: task for key, task in others.items() if key not in train}
    if not val:
        val = {key: train[key] for key in list(train)[1::3]}
        train = {key: task for key, task in train.items() if key not in val}
    return LearningRound(train=list(train.values()), val=list((val or train).values())[:VALIDATION])


def without_words(reward: ComponentConfig) -> ComponentConfig:
    """Return the reward with judges that give a score only, also where a judge is a part of it."""
    return msgspec.structs.replace(reward, params=_silent(reward.use, reward.params))


def _silent(use: str, params: Mapping[str, Json]) -> dict[str, Json]:
    if use == "judge":
        return {**params, "feedback": False}
    if use != "composite":
        return dict(params)
    parts = {name: {**part, "params": _silent(part["use"], part.get("params", {}))} for name, part in _parts(params)}
    return {**params, "parts": parts}


def _judge_lines(use: str, params: Mapping[str, Json]) -> Iterator[str]:
    """Yield the lines of the questions to judges."""
    if use == "judge":
        yield from (line.strip() for line in str(params.get("template", "")).splitlines())
    elif use == "composite":
        for _, part in _parts(params):
            yield from _judge_lines(part["use"], part.get("params", {}))


def _parts(params: Mapping[str, Json]) -> list[tuple[str, dict[str, Any]]]:
    return list(cast("dict[str, dict[str, Any]]", params.get("parts", {})).items())


def _refusal_of(new: Resource, old: Resource) -> str:
    """Return why a resource may not replace the served one, from their kinds, sizes and placeholders."""
    if type(new) is not type(old):
        return f"it is a {type(new).__name__}, and the served version is a {type(old).__name__}"
    if isinstance(new, Weights) and isinstance(old, Weights):
        return _refusal_of_weights(new, old)
    if not isinstance(new, TextResource) or not isinstance(old, TextResource):
        return ""
    text, most = text_of(new), max(LONGEST, GROWTH * len(text_of(old)))
    if len(text) > most:
        return f"it has {len(text):,} characters, and at most {most:,} may be tried"
    try:
        with_text(old, text)
    except ConfigError as error:
        return str(error)
    return ""


def _refusal_of_weights(new: Weights, old: Weights) -> str:
    path = Path(new.uri)
    if path.is_absolute() and not path.is_dir():
        return f"its files are no longer in {path}"
    base = old.base_model or old.uri
    if new.format == "lora" and new.base_model != base:
        return f"it is an adapter of {new.base_model}, and the served weights begin at {base}"
    return ""


def _without_proof(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the algorithm, a prompt search without a proof of its own: the learner compares on more conversations."""
    if algorithm.use not in SEARCHES:
        return algorithm
    scoring = cast("dict[str, Json]", algorithm.params.get("scoring", {}))
    return msgspec.structs.replace(algorithm, params={**algorithm.params, "scoring": {"error": 1, **scoring}})


def _tunes(algorithm: AlgorithmConfig, names: Sequence[str]) -> bool:
    return not algorithm.tunes or not set(names).isdisjoint(algorithm.tunes)


def _words(conversation: Conversation) -> Iterator[str]:
    for text in (conversation.question, conversation.answer, conversation.said):
        yield from (line.strip() for line in text.splitlines())


class _Job(Record, frozen=True, kw_only=True):
    """What a training process runs."""

    config: ExperimentConfig
    folder: str
    tasks: LearningRound


async def _work(process: asyncio.subprocess.Process, job: _Job) -> int:
    if process.stdin is None:
        raise AssertionError("a training process has a pipe")
    process.stdin.write(msgspec.json.encode(job) + b"\n")
    with contextlib.suppress(ConnectionError):  # its exit code says more
        await process.stdin.drain()
    return await process.wait()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the process: like a Ctrl-C, so that it saves its state, and by force if that takes long."""
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(asyncio.shield(process.wait()), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def main() -> None:
    """Run the job on standard input to its end; end at once when standard input ends, because the learner has."""
    os.nice(NICE)
    if _AUTOGROUP.exists():
        _AUTOGROUP.write_text(str(NICE), encoding="ascii")
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Job)
    threading.Thread(target=_end_with_learner, daemon=True).start()
    trainer = Trainer.from_config(job.config, folder=Path(job.folder))
    settle_heap()
    try:
        trainer.fit(None, job.tasks.train, job.tasks.val, resume=True)
    except AglError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with_learner() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
