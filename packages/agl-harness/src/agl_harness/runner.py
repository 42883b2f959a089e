"""The runner of coding harnesses: each attempt runs the harness in a separate sandbox, on a fresh workspace.

The harness calls the model through the gateway, with the attempt's token as its API key. The sandbox stays until the
rewards have read the workspace, or longer if the setting ``keep`` says so. If the sandbox breaks, the attempt is
repeated; if the harness ends, its exit status decides the attempt's outcome.
"""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agl import semconv
from agl.errors import ConfigError, RunError
from agl.hints import check_table
from agl.schemas import (
    LLM,
    AttemptStatus,
    Claim,
    ErrorInfo,
    Json,
    NamedResources,
    Outcome,
    PromptTemplate,
    Span,
    new_span_id,
    new_trace_id,
    to_json,
)
from agl.tracing import redact
from agl_harness.harbor_tasks.checks import check_tasks
from agl_harness.harbor_tasks.dockerfile import Image
from agl_harness.harbor_tasks.folder import PREFIX, filled_variables, load_task
from agl_harness.harbor_tasks.layout import Layout, fill, layout_of
from agl_harness.installation import Program, require
from agl_harness.sandboxes.backends import build_sandboxes, find_backend, private_folders
from agl_harness.sandboxes.contract import (
    HOME,
    TEMPORARY,
    WORKSPACE,
    Finished,
    Limits,
    ManagedSandboxes,
    Sandbox,
    SandboxError,
    TaskSandboxes,
    bytes_of,
)
from agl_harness.sandboxes.local import LocalSandbox, LocalSandboxes
from agl_harness.settings import HarnessSettings
from agl_harness.table import Launch, Model, find, own_files
from agl_harness.table import fill as fill_launch
from agl_harness.workspace import check_apart, fields_of, files_of, fill_workspace, source_of, task_folder_of
from agl_run import AgentSpec, RunContext
from agl_run.programs import describe_error

_PASSED_ON = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "USER",
    "LOGNAME",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "NODE_EXTRA_CA_CERTS",
)
"""Variables of this process that a harness gets; others may hold keys, or point the harness at another model."""


class HarnessRunner:
    """Runs a coding harness for each attempt; see the module's docstring.

    Args:
        setup: The context of the run; its agent names the harness.
        params: Fields of :class:`agl_harness.settings.HarnessSettings`.

    Raises:
        ConfigError: A parameter is wrong, or the harness is not installed.
    """

    def __init__(self, setup: RunContext, **params: Any) -> None:
        agent = setup.agent
        if not agent.harness:
            raise ConfigError("the 'harness' runner needs the name of a harness: write [experiment] harness = \"pi\"")
        self._setup = setup
        self._settings = _settings(params)
        self._folder = Path(agent.folder or ".").absolute()
        self._harness = find(agent.harness, folder=self._folder)
        self._limits = Limits(memory=bytes_of(self._settings.memory), processes=self._settings.processes)
        self._open: dict[str, Sandbox] = {}
        self._base = (setup.workdir or self._folder / "runs").resolve() / "workspaces"
        if agent.workspace and "{" not in agent.workspace:
            check_apart(source_of(agent.workspace, None, folder=self._folder), base=self._base)
        self._sandboxes = build_sandboxes(
            self._settings.sandbox,
            base=self._base,
            hidden=[
                self._folder,
                self._base.parent,
                *private_folders(),
                *(self._folder / name for name in self._hidden()),
            ],
            readable=[*own_files(self._harness), *(self._folder / name for name in self._settings.readable)],
            isolation=self._settings.isolation,
            params=self._settings.sandbox_params,
        )
        if self._settings.keep == "always" and not isinstance(self._sandboxes, LocalSandboxes):
            raise ConfigError(
                f'keep = "always" is for sandbox = "local", and it is {self._settings.sandbox!r}, whose workspaces '
                "cannot be kept; remove keep"
            )
        has_own = isinstance(self._sandboxes, TaskSandboxes) and self._sandboxes.has_images
        self._program = None if has_own else require(self._harness)

    @staticmethod
    def check(agent: AgentSpec, tasks: Sequence[Json] = (), params: Mapping[str, Any] | None = None) -> None:
        """Check an experiment's harness and tasks before anything starts.

        Raises:
            ConfigError: The harness or the sandbox's backend does not exist, or a Harbor task cannot run or needs
                something that the sandbox lacks.
        """
        folder = Path(agent.folder or ".").absolute()
        find(agent.harness, folder=folder)
        found = (
            task_folder_of(agent.workspace, task, folder=folder)
            for task in tasks
            if str(fields_of(task).get("workspace") or agent.workspace).startswith(PREFIX)
        )
        settings = _settings(dict(params or {}))
        if settings.sandbox != "local":
            find_backend(settings.sandbox)
        check_tasks([place for place in found if place is not None], settings=settings)

    def _hidden(self) -> list[str]:
        """Return the folders that the settings hide from sandboxes, and the folder of Harbor tasks."""
        workspace = self._setup.agent.workspace
        tasks = workspace.removeprefix(PREFIX).partition("{")[0] if workspace.startswith(PREFIX) else ""
        return [*self._settings.hidden, *([tasks] if tasks else [])]

    async def start(self) -> None:
        """Start the backend, and remove the local sandboxes of killed runners."""
        if isinstance(self._sandboxes, ManagedSandboxes):
            await self._sandboxes.start()
        if isinstance(self._sandboxes, LocalSandboxes):
            await asyncio.to_thread(self._sandboxes.remove_abandoned)

    async def execute(self, claim: Claim) -> Outcome:
        """Run one attempt; its sandbox stays for the rewards until :meth:`release`.

        Raises:
            SandboxError: The sandbox could not be created, or went away.
        """
        root = _root(claim)
        sandbox: Sandbox | None = None
        try:
            layout = self._layout(claim)
            if layout is not None:
                root = msgspec.structs.replace(root, attributes={semconv.TASK_FOLDER: str(layout.task.folder)})
            sandbox = await self._create(claim, layout)
            self._open[claim.attempt.attempt_id] = sandbox
            launch = await self._prepare(claim, sandbox, layout)
            limits = self._limits_of(claim, layout)
            finished = await sandbox.exec(
                [self._program.path if self._program else launch.words[0], *launch.words[1:]],
                environment=self._environment(sandbox, launch, root, layout),
                stdin=launch.stdin,
                folder=layout.folder if layout else WORKSPACE,
                limits=limits,
            )
        except SandboxError:
            raise
        except (ConfigError, RunError, OSError) as error:
            return self._outcome(root, sandbox, "failed", describe_error(error), "")
        status, error = self._judged(finished, limits)
        return self._outcome(root, sandbox, status, error, redact(finished.output))

    def _layout(self, claim: Claim) -> Layout | None:
        """Return the layout of an attempt's Harbor task; ``None`` if the task is not Harbor's."""
        folder = task_folder_of(self._setup.agent.workspace, claim.rollout.task, folder=self._folder)
        return None if folder is None else layout_of(load_task(folder))

    async def _create(self, claim: Claim, layout: Layout | None) -> Sandbox:
        name = claim.attempt.attempt_id
        if layout is None:
            return await self._sandboxes.create(name)
        if not isinstance(self._sandboxes, TaskSandboxes):
            raise ConfigError(f"the sandbox {self._settings.sandbox!r} cannot run Harbor tasks; use another one")
        return await self._sandboxes.create_for(name, task=layout.task.folder, places=layout.places)

    def _limits_of(self, claim: Claim, layout: Layout | None) -> Limits:
        """Return the limits of an attempt: of each limit, the smaller of the experiment's and the task's."""
        seconds = [claim.rollout.retry.timeout_s, layout.task.agent_s if layout else None]
        memory = [self._limits.memory, layout.task.memory if layout else 0]
        return msgspec.structs.replace(
            self._limits,
            seconds=min((value for value in seconds if value is not None), default=None),
            memory=min((value for value in memory if value), default=0),
            cpus=layout.task.cpus if layout else 0,
        )

    async def _prepare(self, claim: Claim, sandbox: Sandbox, layout: Layout | None) -> Launch:
        """Fill the workspace and the home folder, and return the command that starts the harness."""
        rollout = claim.rollout
        workspace = Path(sandbox.root / WORKSPACE)
        if layout is None:
            source = source_of(self._setup.agent.workspace, rollout.task, folder=self._folder)
            check_apart(source, base=self._base)
            await fill_workspace(sandbox, source, files_of(rollout.visible_task))
        else:
            workspace = Path(layout.task.workdir)
            if self._program is not None:
                await fill(sandbox, layout)
        resources = await self._setup.resources(rollout)
        launch = fill_launch(
            self._harness,
            model=self._model(resources, claim),
            prompt=prompt_of(rollout.visible_task, resources, key=self._settings.prompt),
            home=Path(sandbox.root / HOME),
            workspace=workspace,
            arguments=self._settings.arguments,
        )
        for path, text in launch.files.items():
            await sandbox.write(f"{HOME}/{path}", text.encode())
        return launch

    def _model(self, resources: NamedResources, claim: Claim) -> Model:
        llms = {name: value for name, value in resources.items() if isinstance(value, LLM)}
        name = self._settings.policy or (next(iter(llms)) if len(llms) == 1 else "")
        if name not in llms:
            raise ConfigError(
                f"a harness calls one policy, and there are {sorted(llms)}; name it: [runner] params = {{ policy = "
                '"NAME" }'
            )
        return Model(
            base_url=f"{self._setup.gateway_url}/v1" if self._setup.gateway_url else llms[name].endpoint,
            key=self._setup.token_of(claim),
            name=llms[name].model or name,
            context=self._settings.context,
            output=self._settings.output,
        )

    def _environment(self, sandbox: Sandbox, launch: Launch, root: Span, layout: Layout | None) -> dict[str, str]:
        task = layout.task if layout else None
        base = base_environment(sandbox, self._program)
        return {
            **(with_image(base, task.image) if task else base),
            **(filled_variables(task.environment, self._settings.environment) if task else {}),
            "TRACEPARENT": f"00-{root.trace_id}-{root.span_id}-01",
            **launch.environment,
            **self._settings.environment,
        }

    def _judged(self, finished: Finished, limits: Limits) -> tuple[AttemptStatus, ErrorInfo | None]:
        name = self._harness.label
        if finished.exceeded == "seconds":
            text = f"{name} ran longer than {limits.seconds:g} s and was stopped"
            return "timeout", ErrorInfo(type="TimeoutError", message=text)
        if finished.exceeded:
            text = f"{name} used {finished.detail} and was stopped; raise {finished.exceeded} in the runner's params"
            return "failed", ErrorInfo(type="LimitExceeded", message=text)
        if finished.code == 0:
            return "succeeded", None
        complaints = redact(finished.errors)
        last = complaints.strip().splitlines()[-1] if complaints.strip() else "it printed nothing on standard error"
        text = f"{name} ended with exit code {finished.code}: {last[:500]}"
        return "failed", ErrorInfo(type="ProcessExit", message=text, traceback=complaints)

    def _outcome(
        self, root: Span, sandbox: Sandbox | None, status: AttemptStatus, error: ErrorInfo | None, output: str
    ) -> Outcome:
        if error is not None and isinstance(sandbox, LocalSandbox) and self._settings.keep != "never":
            kept = f"{error.message}. Its workspace is kept in {sandbox.address}"
            error = msgspec.structs.replace(error, message=kept)
        closed = msgspec.structs.replace(
            root,
            end_ns=time.time_ns(),
            status="ok" if status == "succeeded" else "error",
            status_message="" if error is None else error.message,
            attributes={
                **root.attributes,
                semconv.OUTPUT: output,
                **({semconv.WORKSPACE: sandbox.address} if sandbox is not None else {}),
                semconv.SANDBOX: self._settings.sandbox,
                semconv.HARNESS: f"{self._harness.name} {self._harness.pin}".strip(),
            },
        )
        return Outcome(attempt_id=root.attempt_id, status=status, error=error, spans=(closed,))

    async def release(self, claim: Claim, outcome: Outcome | None) -> None:
        """Remove an attempt's sandbox, or keep its folder if the setting ``keep`` says so."""
        sandbox = self._open.pop(claim.attempt.attempt_id, None)
        if sandbox is None:
            return
        keep = self._settings.keep
        is_kept = outcome is not None and (keep == "always" or (keep == "failed" and outcome.status != "succeeded"))
        if is_kept and isinstance(sandbox, LocalSandbox) and isinstance(self._sandboxes, LocalSandboxes):
            await sandbox.keep()
            await asyncio.to_thread(self._sandboxes.prune, self._settings.keep_at_most)
        else:
            await sandbox.close()

    async def stop(self) -> None:
        """End and remove every sandbox."""
        left, self._open = list(self._open.values()), {}
        await asyncio.gather(*(sandbox.close() for sandbox in left))
        if isinstance(self._sandboxes, ManagedSandboxes):
            await self._sandboxes.close()


def base_environment(sandbox: Sandbox, program: Program | None = None) -> dict[str, str]:
    """Return the variables that any program in a sandbox gets; its ``python`` is the Python that runs agl."""
    passed = {name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith("LC_")}
    inherited = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = f"{Path(program.path).parent}{os.pathsep}" if program is not None else ""
    return {
        **passed,
        "PATH": own + inherited,
        "HOME": str(sandbox.root / HOME),
        "TMPDIR": str(sandbox.root / TEMPORARY),
        "TERM": "dumb",
        "NO_COLOR": "1",
        "CI": "1",
    }


def with_image(environment: Mapping[str, str], image: Image) -> dict[str, str]:
    """Return variables with those of an image added; the image's ``PATH`` precedes the given one."""
    added = image.variables.get("PATH", "").split(os.pathsep)
    path = os.pathsep.join([*filter(None, added), environment["PATH"]])
    return {**environment, **image.variables, "PATH": path}


def prompt_of(task: Json, resources: Mapping[str, object], *, key: str) -> str:
    """Return the prompt for a task.

    It is the experiment's prompt template filled with the task, or without a template the task itself if it is text,
    or else the task's field ``key``.

    Raises:
        ConfigError: The experiment has several prompts, or the task has no text in the field ``key``.
    """
    prompts = {name: value for name, value in resources.items() if isinstance(value, PromptTemplate)}
    if len(prompts) > 1:
        raise ConfigError(f"a harness gets one prompt, and there are {sorted(prompts)}; keep one [resource.NAME]")
    if prompts:
        return next(iter(prompts.values())).format(**(fields_of(task) or {"task": task}))
    if isinstance(task, str):
        return task
    found = fields_of(task).get(key)
    if not isinstance(found, str) or not found.strip():
        has = ", ".join(sorted(fields_of(task))) or to_json(task).decode()[:60]
        raise ConfigError(
            f"the task has no text {key!r} for the harness, only {has}; add it, name another key with params = "
            '{ prompt = "KEY" } of the runner, or write [resource.prompt] with a template such as "Fix {issue}"'
        )
    return found


def _settings(params: dict[str, Any]) -> HarnessSettings:
    known = HarnessSettings.__struct_fields__
    unknown = [name for name in params if name not in known]
    if unknown:
        raise ConfigError(f"the runner 'harness' has no parameter {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return check_table(params, HarnessSettings, "runner.params.")


def _root(claim: Claim) -> Span:
    return Span(
        rollout_id=claim.rollout.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        span_id=new_span_id(),
        trace_id=new_trace_id(),
        name=semconv.ROOT_SPAN_NAME,
        start_ns=time.time_ns(),
    )
