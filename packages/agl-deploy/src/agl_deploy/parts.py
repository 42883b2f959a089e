"""The parts of a deployment, each with a command, environment variables and a health check.

The images and the compose file run these commands. The chart runs the same commands with other host names.
"""

import shlex

from agl.schemas import Record
from agl_deploy.needs import Needs
from agl_run import WORKER_TOKEN_ENV

GATEWAY_PORT = 4747
TRAINER_PORT = 4748
CONSOLE_PORT = 8000

BUNDLED = "postgresql://agl@postgres/agl"
"""URL of the PostgreSQL that a compose file includes."""

HEALTH = "/opt/agl/health.py"
"""Path of the health check's script in the images."""

SECRETS = {
    "AGL_SECRET": "signs tokens, and opens the gateway's store",
    WORKER_TOKEN_ENV: "what workers have in place of it, until it expires; AGL_SECRET=... {command} prints one",
    "AGL_TOKEN": "the admin token of the gateway",
    "AGL_CONSOLE_PASSWORD": "the console's password, with any user name",
    "PGPASSWORD": "the password of the database",
}
"""Environment variables that every deployment needs, with the purpose of each."""


class Part(Record, frozen=True, kw_only=True):
    """A process of a deployment.

    Attributes:
        name: ``gateway``, ``trainer``, ``worker`` or ``console``.
        command: The part's command, which runs in the experiment's folder.
        health: The command of the health check, which exits with 0 while the part is healthy.
        secrets: Environment variables that the part needs.
    """

    name: str
    command: tuple[str, ...]
    health: tuple[str, ...]
    secrets: tuple[str, ...]


def parts_of(needs: Needs) -> dict[str, Part]:
    """Return the parts by name, in the order in which they start, with the host names of a compose file."""
    file, store = needs.file.name, needs.store or BUNDLED
    served = f"http://gateway:{GATEWAY_PORT}"
    parts = (
        Part(
            name="gateway",
            command=(
                *("agl", "serve", "--store", store, "--host", "0.0.0.0", "--port", str(GATEWAY_PORT)),
                *("--allow-host", "gateway"),
            ),
            health=_health(f"http://127.0.0.1:{GATEWAY_PORT}/healthz"),
            secrets=("AGL_SECRET", "AGL_TOKEN", "PGPASSWORD"),
        ),
        Part(
            name="trainer",
            command=(
                *("agl", "run", file, "--resume", "--quiet"),
                *_set("experiment.store", store),
                *_set("experiment.workdir", "/data/runs"),
                *_set("runner.concurrency", "0"),
                *_set("gateway.advertise", "trainer"),
                *_set("gateway.params.host", "0.0.0.0"),
                *_set("gateway.params.port", str(TRAINER_PORT)),
                *_set("gateway.params.spool", "/data/spool"),
            ),
            health=_health(f"http://127.0.0.1:{TRAINER_PORT}/healthz"),
            secrets=_once("AGL_SECRET", "PGPASSWORD", *needs.variables["trainer"]),
        ),
        Part(
            name="worker",
            command=("agl", "worker", file, "--store", served),
            health=_health(f"{served}/healthz"),
            secrets=_once(WORKER_TOKEN_ENV, *needs.variables["worker"]),
        ),
        Part(
            name="console",
            command=("agl", "console", store, "--host", "0.0.0.0", "--port", str(CONSOLE_PORT)),
            health=_health(f"http://127.0.0.1:{CONSOLE_PORT}/"),
            secrets=("AGL_CONSOLE_PASSWORD", "PGPASSWORD"),
        ),
    )
    return {part.name: part for part in parts}


def secrets_of(needs: Needs) -> dict[str, str]:
    """Return every environment variable that needs a value from the user, with its purpose."""
    own = {name for names in needs.variables.values() for name in names}
    command = shlex.join(["agl", "worker-token", needs.experiment, "--valid", "365d"])
    general = {name: use.format(command=command) for name, use in SECRETS.items()}
    return {**general, **{name: "a key that the experiment's file names" for name in sorted(own - general.keys())}}


def _once(*names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _set(key: str, value: str) -> tuple[str, str]:
    return ("--set", f"{key}={value}")


def _health(url: str) -> tuple[str, ...]:
    return ("python", HEALTH, url)
