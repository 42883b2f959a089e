"""The settings of the runner ``harness``, which experiments write as the runner's parameters."""

from typing import Literal

from agl.schemas import Json, Record
from agl_harness.harbor_tasks.folder import Lack
from agl_harness.sandboxes.isolation import Kind


class HarnessSettings(Record, frozen=True, kw_only=True):
    """Settings of the runner ``harness``.

    Attributes:
        policy: Name of the policy that the harness calls; by default the only policy.
        prompt: Key of the task's field with the prompt, used if the experiment has no prompt template.
        arguments: Further arguments of the harness.
        context: Context length for the harness's own settings: the most tokens of a prompt and its answer together.
        output: Answer length for the harness's own settings: the most tokens of one answer.
        memory: Memory limit of all the harness's processes together, such as ``8GB``; ``""`` for no limit.
        processes: Largest number of the harness's processes; 0 for no limit.
        keep: When an attempt's workspace is kept in the experiment's work directory: after ``failed`` attempts only,
            ``never``, or ``always``.
        keep_at_most: Largest number of kept workspaces; the oldest are removed first.
        sandbox: ``local``, the name of a backend in the entry-point group ``agl_sandboxes``, or ``module:attribute``.
        sandbox_params: Parameters of the backend ``sandbox``.
        without: Needs of Harbor tasks that the sandbox does not have to meet, such as ``build`` for packages that a
            Dockerfile installs; see :data:`agl_harness.harbor_tasks.folder.LACKS`.
        isolation: Isolation of rollouts with ``sandbox = "local"``: ``auto`` uses bubblewrap if it works, ``bwrap``
            raises an error if it does not, and ``none`` does not isolate.
        hidden: Folders, relative to the experiment file, that appear empty to the harness, as do the experiment file's
            own folder and this user's home.
        readable: Files and folders, relative to the experiment file, that the harness may read within hidden ones.
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
