"""The reward ``harbor``: runs a Harbor task's tests once the agent has ended, and reads the reward that they write.

The tests are copied in only after the agent has ended: into a copy of the agent's sandbox, or, if the task asks for it,
into a separate sandbox that gets only the task's artifacts. If the tests write no reward, or one that is not a number,
the reward is 0.0: the agent may have caused that, and a policy must not gain by it. ``agl harness oracle`` shows
whether a task's tests work.
"""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agl import semconv
from agl.contracts import RewardSetup
from agl.errors import ConfigError
from agl.schemas import Reward, Rollout, Span, new_span_id
from agl_harness.harbor_tasks.folder import TaskFolder, filled_variables, load_task
from agl_harness.harbor_tasks.layout import LOGS, TESTS, Layout, fill, layout_of, layout_of_tests
from agl_harness.runner import base_environment, with_image
from agl_harness.sandboxes.backends import attach
from agl_harness.sandboxes.contract import (
    CopyableSandbox,
    Finished,
    Limits,
    PathError,
    Sandbox,
    Sandboxes,
    TaskSandboxes,
    bytes_of,
)
from agl_harness.workspace import task_folder_of

_PROGRAM = "chmod +x /tests/test.sh && exec /tests/test.sh"
_CLEAR = (
    "for place in /logs /tests; do [ -L $place ] || chmod -R u+rwX $place; done 2>/dev/null; "
    "rm -rf -- /logs/verifier; rm -rf -- /tests 2>/dev/null; "  # fails if /tests is a mount, which is fine
    'mkdir -p /logs/verifier /tests && [ -z "$(ls -A /logs/verifier)$(ls -A /tests)" ]'
)
"""Removes the agent's files from /tests and /logs/verifier, and fails if some remain."""

_FILES = ("reward.json", "reward.txt")
_MOST = 16_000
"""Largest length of a reward file, in characters."""

_READ_S = 30.0
_FEEDBACK = 2_000
"""Number of characters from the end of the tests' output that become the reward's feedback."""


class HarborTests:
    """Rewards an agent's work on a Harbor task with the task's own tests.

    Args:
        setup: Provides the experiment's folder.
        memory: Memory limit of the tests, unless the task sets one.
        processes: Largest number of processes of the tests.
        variables: Names of this process's environment variables that a task's tests may get, such as a judge's key.

    Raises:
        ConfigError: ``memory`` is not a size.
    """

    def __init__(
        self, *, setup: RewardSetup, memory: str = "8GB", processes: int = 512, variables: Sequence[str] = ()
    ) -> None:
        self._folder = setup.folder.absolute()
        self._limits = Limits(memory=bytes_of(memory), processes=processes)
        self._variables = tuple(variables)

    async def __call__(self, rollout: Rollout, spans: Sequence[Span]) -> Reward:
        """Run the tests.

        Raises:
            SandboxError: The sandbox went away.
            ConfigError: The task is not a Harbor task.
        """
        found = await attach(spans, reward="harbor", folder=self._folder)
        folder = task_folder_of("", rollout.task, folder=self._folder) or found.record.get(semconv.TASK_FOLDER)
        if folder is None:
            raise ConfigError(
                'the reward "harbor" found no Harbor task; name a folder of them, as in train = "harbor:tasks"'
            )
        given = {name: os.environ[name] for name in self._variables if name in os.environ}
        task = load_task(Path(folder))
        return await grade(task, found.sandbox, sandboxes=found.sandboxes, limits=self._limits, variables=given)


async def grade(
    task: TaskFolder,
    sandbox: Sandbox,
    *,
    sandboxes: Sandboxes,
    limits: Limits,
    variables: Mapping[str, str],
) -> Reward:
    """Run a task's tests on the files that an agent left in the sandbox, and return the reward.

    Raises:
        SandboxError: The sandbox went away.
    """
    bound = Limits(
        seconds=task.verifier_s, memory=task.memory or limits.memory, processes=limits.processes, cpus=task.cpus
    )
    if task.is_separate:
        testing, layout = await _apart(task, sandbox, sandboxes)
    elif isinstance(sandbox, CopyableSandbox):
        testing, layout = await sandbox.snapshot(), layout_of(task)
    else:
        return await _test(task, sandbox, layout_of(task), limits=bound, variables=variables)
    try:
        return await _test(task, testing, layout, limits=bound, variables=variables)
    finally:
        await testing.close()


async def _apart(task: TaskFolder, agent: Sandbox, sandboxes: Sandboxes) -> tuple[Sandbox, Layout]:
    """Make a separate sandbox for the tests, with the artifacts from the agent's sandbox."""
    if not isinstance(sandboxes, TaskSandboxes):
        raise ConfigError(f"the sandbox {type(sandboxes).__name__} cannot run Harbor tasks; use another one")
    theirs = layout_of(task)
    with tempfile.TemporaryDirectory(prefix="agl-artifacts-") as temporary:
        found: dict[str, Path] = {}
        for number, path in enumerate(task.artifacts):
            inside = theirs.inside(path)
            if inside is not None and await _take(agent, inside, Path(temporary, str(number))):
                found[path] = Path(temporary, str(number))
        layout = layout_of_tests(task, extra=list(found))
        name = f"tests-{new_span_id()}"
        sandbox = await sandboxes.create_for(name, task=task.folder, places=layout.places, purpose="tests")
        try:
            if not sandboxes.has_images:
                await fill(sandbox, layout)
            for path, source in found.items():
                inside = layout.inside(path)
                if inside is not None:
                    await sandbox.upload(source, inside)
        except BaseException:
            await sandbox.close()
            raise
    return sandbox, layout


async def _take(sandbox: Sandbox, path: str, target: Path) -> bool:
    try:
        await sandbox.download(path, target)
    except (FileNotFoundError, NotADirectoryError, PathError):
        return False
    return True


async def _test(
    task: TaskFolder, sandbox: Sandbox, layout: Layout, *, limits: Limits, variables: Mapping[str, str]
) -> Reward:
    environment = with_image(base_environment(sandbox), task.test_image or task.image)
    cleared = await _run(sandbox, ["/bin/sh", "-c", _CLEAR], {"PATH": os.defpath})
    if cleared.code != 0:
        stuck = "what the agent left in /tests or /logs/verifier could not be removed"
        return Reward(value=0.0, name="harbor", feedback=f"{stuck}\n{cleared.errors}".strip())
    await sandbox.upload(task.folder / "tests", TESTS)
    done = await sandbox.exec(
        ["/bin/sh", "-c", _PROGRAM],
        environment={
            **environment,
            **filled_variables(task.environment, dict(variables)),
            **filled_variables(task.verifier_environment, dict(variables)),
        },
        folder=layout.folder,
        limits=limits,
    )
    shown = f"{done.output}\n{done.errors}".strip()[-_FEEDBACK:]
    if done.exceeded:
        return Reward(value=0.0, name="harbor", feedback=f"the tests were stopped at {done.detail}\n{shown}")
    for name in _FILES:
        text = await _text(sandbox, name, environment)
        if text is not None:
            return _reward(name, text, shown)
    return Reward(value=0.0, name="harbor", feedback=f"the tests wrote no reward (exit status {done.code})\n{shown}")


async def _text(sandbox: Sandbox, name: str, environment: Mapping[str, str]) -> str | None:
    """Return the first characters of a reward file; ``None`` if it is missing, a pipe or a link."""
    script = f'[ -f "$1" ] && [ ! -L "$1" ] && head -c {_MOST + 1} -- "$1"'
    done = await _run(sandbox, ["/bin/sh", "-c", script, "sh", f"/logs/verifier/{name}"], environment)
    return done.output if done.code == 0 else None


async def _run(sandbox: Sandbox, words: Sequence[str], environment: Mapping[str, str]) -> Finished:
    return await sandbox.exec(words, environment=environment, folder=LOGS, limits=Limits(seconds=_READ_S))


def _reward(name: str, text: str, shown: str) -> Reward:
    """Read the reward from a file that the tests wrote: a number, or in ``reward.json`` also numbers by name.

    The value is then the number named ``reward``, or else the mean of all numbers.
    """
    parts = None if len(text) > _MOST else _numbers(text, is_json=name.endswith(".json"))
    if parts is None:
        feedback = f"the tests wrote no number into {name}, but {text[:80]!r}\n{shown}"
        return Reward(value=0.0, name="harbor", feedback=feedback)
    value = parts.get("reward", next(iter(parts.values())) if len(parts) == 1 else None)
    if value is None:
        value = sum(parts.values()) / len(parts)
    dimensions: dict[str, float | None] = {key: part for key, part in parts.items() if key != "reward"}
    return Reward(value=value, name="harbor", dimensions=dimensions, feedback=shown)


def _numbers(text: str, *, is_json: bool) -> dict[str, float] | None:
    """Parse the numbers of a reward file, by name; ``None`` if there are none, or if one is not a finite number."""
    try:
        found: Any = json.loads(text) if is_json else float(text)
        parts = cast("dict[str, Any]", found) if isinstance(found, dict) else {"reward": found}
        values = {name: float(value) for name, value in parts.items() if isinstance(value, int | float)}
    except (ValueError, OverflowError, RecursionError):
        return None
    return values if parts and values.keys() == parts.keys() and all(map(math.isfinite, values.values())) else None
