"""Builds the images of the calculator, trains it across them, and kills each container once."""

import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agl import PluginManager
from agl_deploy.files import wheel_command
from agl_deploy.needs import read_needs
from agl_run.access import AttemptTokens
from tools.images import __doc__ as about
from tools.images._build import BASE, PYTHON, Images, call, missing, wheels
from tools.images._containers import Compose
from tools.networks import forbidden

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".nox" / "images-store"
POSTGRES = "localhost/agl-postgres"
STEPS = 6
GROUPS = (8, 8)
SMALL = {
    "validate_every = 5": "validate_every = 5\nvalidation_limit = 8",
    "concurrency = 64": "concurrency = 2\nmax_losses = 1000",
    "steps = 18": f"steps = {STEPS}",
}
"""Changes to the example's file, for a training of a minute."""

KILLS = ("worker-1", "gateway", "postgres", "trainer", "worker-2", "console")
"""The order in which containers are killed, while rollouts run."""

WITHIN_S = 900.0
_SLACK_S = 3600.0


def main() -> None:
    """Run all of it; ends with an error that says what went wrong."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(about, flush=True)
    lacking = [f"install {name}" for name in missing()] + [reason for reason in [forbidden()] if reason]
    if lacking:
        sys.exit(f"images cannot be built and run here: {'; '.join(lacking)} (apt install buildah mmdebstrap iproute2)")
    FOLDER.mkdir(parents=True, exist_ok=True)
    images = Images(folder=FOLDER, suite=_suite())
    with tempfile.TemporaryDirectory(prefix="agl-images-") as name:
        Path(name).chmod(0o755)
        try:
            compose = _build(images, Path(name) / "calc")
            try:
                _train(compose)
            finally:
                compose.close()
        finally:
            images.close()


def _suite() -> str:
    """Return the name of this machine's distribution, whose Python must be the one that runs this."""
    lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    suite = next((line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME=")), "")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    system = call("/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    if not suite or system != own:
        sys.exit(f"the system's packages have Python {system} and this runs in {own}: run nox with Python {system}")
    return suite


def _build(images: Images, project: Path) -> Compose:
    """Write the files, build the images that they name, and print their sizes."""
    example = ROOT / "examples" / "calc"
    shutil.copytree(example, project, ignore=shutil.ignore_patterns("out", "tests", "__pycache__", "*.png", "demo*"))
    for path in project.glob("autogen*"):
        path.unlink()
    file = project / "experiment.toml"
    text = file.read_text(encoding="utf-8")
    for old, new in SMALL.items():
        if old not in text:
            sys.exit(f"{example / file.name} has no line {old!r} to make smaller")
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    for program in (example / "make_data.py", example.parent / "make_model.py"):
        call(sys.executable, str(program), folder=project)
    print(call(sys.executable, "-m", "agl", "deploy", "compose", "experiment.toml", folder=project))
    needs = read_needs(file, PluginManager.from_environment())
    began = time.monotonic()
    wheels(project, wheel_command(needs, "deploy"))
    _said("wheels", began)

    began = time.monotonic()
    images.base(BASE, PYTHON)
    images.database(POSTGRES)
    _said("base images", began)
    compose = yaml.safe_load((project / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    tags = {"postgres:17": POSTGRES}
    for service in compose["services"].values():
        if "build" in service and service["image"] not in tags:
            tags[service["image"]] = tag = f"localhost/{service['image']}"
            began = time.monotonic()
            images.build(service["build"]["target"], project=project, tag=tag)
            _said(service["image"], began)
    found = {tag: images.open(own) for tag, own in tags.items()}
    for tag, image in found.items():
        if image.user.split(":")[0] in ("", "0"):
            sys.exit(f"{tag} runs as root")
        print(f"{tag}: {image.size / 1e6:.0f} MB, user {image.user}")
    names = sorted({name for service in compose["services"].values() for name in service["environment"]})
    values = {name: secrets.token_hex(16) for name in names} | {"POSTGRES_USER": "agl", "POSTGRES_DB": "agl"}
    tokens, until = AttemptTokens(values["AGL_SECRET"].encode()), time.time() + WITHIN_S + _SLACK_S
    values["AGL_WORKER_TOKEN"] = tokens.issue_for_worker(needs.experiment, expires_at=until)
    return Compose(file=compose, images=found, secrets=values, folder=project.parent)


def _train(compose: Compose) -> None:
    """Start everything, kill each container once while it trains, and see that every rollout was trained once."""
    compose.open()
    for name in compose.containers:
        container = compose.start(name)
        print(f"{name}: healthy after {container.ready_s:.1f} s", flush=True)
    _see_networks(compose)
    pending, end, due, state = list(KILLS), time.monotonic() + WITHIN_S, 8, dict[str, Any]()
    while state.get("status") != "finished" or compose.containers["trainer"].status is None:
        if time.monotonic() > end:
            _fail(compose, f"it did not finish: {state}")
        compose.tend()
        state = _state(compose) or state
        if pending and state.get("rollouts", 0) and state["finished"] >= due:
            print(
                f"kill {pending[0]} after {state['finished']} rollouts, {state['trained']} of them trained", flush=True
            )
            compose.kill(pending.pop(0))
            due = state["finished"] + STEPS * GROUPS[0] * GROUPS[1] // (len(KILLS) + 1)
        time.sleep(0.2)
    if pending:
        _fail(compose, f"it finished before {', '.join(pending)} could be killed")
    _check(compose, state)


def _state(compose: Compose) -> Mapping[str, Any] | None:
    address = compose.networks.addresses["postgres", "data"]
    url = f"postgresql://agl:{compose.secrets['PGPASSWORD']}@{address}/agl"
    found = compose.look(sys.executable, "-m", "tools.images._look", url)
    return json.loads(found) if found else None


def _see_networks(compose: Compose) -> None:
    """See that workers reach the gateway and the trainer, and not the database."""
    wanted = {
        ("worker-1", "gateway", 4747): True,
        ("worker-1", "trainer", 4748): True,
        ("console", "postgres", 5432): True,
        ("worker-1", "postgres", 5432): False,
    }
    found = {each: compose.reaches(*each) for each in wanted}
    if found != wanted:
        _fail(compose, f"the networks are not those of the compose file: {found}")


def _check(compose: Compose, state: Mapping[str, Any]) -> None:
    wanted = STEPS * GROUPS[0] * GROUPS[1]
    print(json.dumps(state))
    if (state["trained"], state["rollouts"], state["by_status"]) != (wanted, wanted, {"succeeded": wanted}):
        _fail(compose, f"not every one of {wanted} rollouts was trained once")
    starts = {name: container.starts for name, container in compose.containers.items()}
    print(f"every one of {wanted} rollouts was trained once; attempts lost and repeated: {state['losses']}")
    print(f"starts: {starts}")
    print(next(line for line in compose.log("trainer").splitlines() if line.startswith("validation reward")))


def _fail(compose: Compose, reason: str) -> None:
    for name in compose.containers:
        print(f"--- {name}\n{compose.log(name)[-2000:]}")
    sys.exit(reason)


def _said(name: str, began: float) -> None:
    print(f"{name}: made in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
