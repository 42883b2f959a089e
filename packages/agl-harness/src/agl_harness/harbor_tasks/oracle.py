"""``agl harness oracle``: runs Harbor tasks' solutions in place of an agent, and grades the results."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from agl.errors import AglError
from agl.schemas import Record
from agl_harness.harbor_tasks.checks import check_tasks, task_folders
from agl_harness.harbor_tasks.folder import SOLUTION_SCRIPT, Lack, TaskFolder, filled_variables, load_task
from agl_harness.harbor_tasks.grading import grade
from agl_harness.harbor_tasks.layout import SOLUTION, fill, layout_of
from agl_harness.runner import base_environment, with_image
from agl_harness.sandboxes.backends import private_folders
from agl_harness.sandboxes.contract import Limits, bytes_of
from agl_harness.sandboxes.local import LocalSandboxes
from agl_harness.settings import HarnessSettings

_PROGRAM = f"chmod +x /solution/{SOLUTION_SCRIPT} && exec /solution/{SOLUTION_SCRIPT}"
_SHOWN = 500


class Verdict(Record, frozen=True, kw_only=True):
    """The result of running a task's solution.

    Attributes:
        name: The task's name.
        reward: The reward from the task's tests.
        problem: The reason why there is no reward, or the end of the output of solution or tests; ``""`` if the reward
            is at least 1.
    """

    name: str
    reward: float = 0.0
    problem: str = ""


async def solve_all(name: str, *, without: Sequence[Lack] = ()) -> list[Verdict]:
    """Run the solutions of the tasks that a name or pattern matches, one at a time, in local sandboxes.

    Raises:
        ConfigError: A task cannot run on this machine.
        DatasetError: There is no such task.
    """
    settings = HarnessSettings(without=tuple(without))
    folders = task_folders(name, Path())
    check_tasks(folders, settings=settings)
    with tempfile.TemporaryDirectory(prefix="agl-oracle-") as base:
        above = {folder.absolute().parent for folder in folders}
        sandboxes = LocalSandboxes(base=Path(base), hidden=[*sorted(above), *private_folders()])
        return [await _solve(load_task(folder), sandboxes, settings) for folder in folders]


async def _solve(task: TaskFolder, sandboxes: LocalSandboxes, settings: HarnessSettings) -> Verdict:
    name = task.folder.name
    if not (task.folder / SOLUTION / SOLUTION_SCRIPT).is_file():
        return Verdict(name=name, problem=f"it has no {SOLUTION}/{SOLUTION_SCRIPT}")
    limits = Limits(memory=bytes_of(settings.memory), processes=settings.processes)
    try:
        layout = layout_of(task, extra=[f"/{SOLUTION}"])
        sandbox = await sandboxes.create_for(name, task=task.folder, places=layout.places)
        try:
            await fill(sandbox, layout)
            await sandbox.upload(task.folder / SOLUTION, layout.inside(f"/{SOLUTION}") or SOLUTION)
            done = await sandbox.exec(
                ["/bin/sh", "-c", _PROGRAM],
                environment={
                    **with_image(base_environment(sandbox), task.image),
                    **filled_variables(task.environment, {}),
                    **filled_variables(task.solution_environment, {}),
                },
                folder=layout.folder,
                limits=Limits(seconds=task.agent_s, memory=task.memory or limits.memory, processes=limits.processes),
            )
            reward = await grade(task, sandbox, sandboxes=sandboxes, limits=limits, variables={})
        finally:
            await sandbox.close()
    except AglError as error:
        return Verdict(name=name, problem=str(error))
    value = reward.value or 0.0
    if value >= 1:
        return Verdict(name=name, reward=value)
    ending = f"{done.output}{done.errors}".strip()[-_SHOWN:]
    failed = f"the solution ended with {done.exceeded or f'exit status {done.code}'}: {ending}" if done.code else ""
    reason = (failed or reward.feedback[-_SHOWN:]).strip()
    return Verdict(name=name, reward=value, problem=f"{value:g}{'; ' if reason else ''}{reason}")
