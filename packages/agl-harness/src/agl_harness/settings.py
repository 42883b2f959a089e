"""The settings of harnesses that experiments write as the runner's parameters."""

from typing import Literal

from agl.schemas import Json, Record
from agl_harness.harbor_tasks.folder import Lack
from agl_harness.sandboxes.isolation import Kind


class HarnessSettings(Record, frozen=True, kw_only=True):
    """Settings of the runner of harnesses.

    Attributes:
        policy: Name of the policy that it calls; by default the only one.
        prompt: Key of a task that holds its prompt, where the experiment has no prompt of its own.
        arguments: Further arguments of the harness.
        context: Most tokens of a prompt with its answer, for the harness's own settings.
        output: Most tokens of an answer, for the same purpose.
        memory: Memory of all its processes at most, such as ``8GB``; ``""`` for no limit.
        processes: Number of its processes at most; 0 for no limit.
        keep: When a workspace stays in the experiment's work directory: after attempts that ``failed``, ``never`` or
            ``always``.
        keep_at_most: Number of workspaces that stay; the oldest go first.
        sandbox: ``local``, the name of a backend in the entry-point group ``agl_sandboxes``, or ``module:attribute``.
        sandbox_params: Parameters of that backend.
        without: What Harbor tasks may ask for and the sandbox need not give, such as ``build`` for what a Dockerfile
            installs; see :data:`agl_harness.harbor_tasks.folder.LACKS`.
        isolation: For ``local``: ``auto`` keeps rollouts apart with bubblewrap where it works, ``bwrap`` refuses to go
            without, ``none`` does not.
        hidden: Folders, relative to the experiment file, that the harness finds empty, besides that of the experiment
            file and this user's home.
        readable: Files and folders, relative to the experiment file, that it may read nevertheless.
        environment: Further variables of the harness.
    """

    policy: str = ""
    prompt: str = "prompt"
    arguments: tuple[str, ...] = ()
    context: int = 128_000
    output: int = 8_192
    memory: str = "8GB"
    processes: int = 512
    keep: Literal["failed", "never", "always"] = "failed"
    keep_at_most: int = 20
    sandbox: str = "local"
    sandbox_params: dict[str, Json] = {}
    without: tuple[Lack, ...] = ()
    isolation: Kind = "auto"
    hidden: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    environment: dict[str, str] = {}
