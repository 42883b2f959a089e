"""Writes files that serve the labelled version of a policy's weights with vLLM, next to a deployment.

The files name the label and no version: a version is promoted, or taken back, by moving the label.
"""

import shlex

from agl.errors import ConfigError
from agl_deploy.needs import Needs, deployed_name
from agl_deploy.parts import GATEWAY_PORT
from agl_deploy.rendering import fill, template
from agl_inspect.records.labels import LABEL

SCRIPT = "serve_model.py"
_FOLDER = "/models/served"
_TAKEN = ("postgres", "gateway", "trainer", "worker", "console", "database", "trained", "dashboard", "ray")
"""Names that a deployment has given to its own parts and volumes."""


def parse_model(text: str, needs: Needs) -> tuple[str, str]:
    """Return the policy and the label of ``NAME@LABEL``; raises :class:`ConfigError`."""
    policy, at, label = text.partition("@")
    if not (at and LABEL.fullmatch(label)):
        raise ConfigError(
            f"{text!r} is not NAME@LABEL, such as main_llm@production; agl resources promote gives a version a label"
        )
    if policy not in needs.trained:
        known = f"trained are {', '.join(needs.trained)}" if needs.trained else "none of its policies can be trained"
        raise ConfigError(f"{needs.file.name} has no policy {policy!r} whose weights are trained; {known}")
    return policy, label


def serving_files(needs: Needs, model: str, folder: str, *, gpus: int) -> dict[str, str]:
    """Return the files by path.

    Args:
        needs: What the experiment needs.
        model: ``NAME@LABEL``.
        folder: Where they go, relative to the experiment's folder.
        gpus: GPUs of the server.
    """
    policy, label = parse_model(model, needs)
    own = deployed_name(policy)
    own = f"{own}-model" if own in _TAKEN else own
    script = template(SCRIPT)
    common = {
        "policy": policy,
        "label": label,
        "name": needs.name,
        "folder": folder,
        "file": f"model-{own}",
        "gpus": gpus,
        "image": f"{needs.name}-gateway:local",
        "script": script,
        "serve": ["python3", f"/opt/agl/{SCRIPT}", _FOLDER, policy],
    }
    return {
        SCRIPT: script,
        f"model-{own}.compose.yaml": fill("model.compose.yaml", service=own, fetch=_fetch(model, "gateway"), **common),
        f"model-{own}.kubernetes.yaml": fill(
            "model.kubernetes.yaml",
            service=f"{needs.name}-{own}",
            fetch=_fetch(model, f"{needs.name}-gateway"),
            **common,
        ),
    }


def _fetch(model: str, gateway: str) -> list[str]:
    """Return the command that copies the files of the version that has the label now."""
    store = f"http://{gateway}:{GATEWAY_PORT}"
    export = f"agl data export {shlex.quote(model)} --store {store} --format model --output {_FOLDER}"
    return ["sh", "-c", f"rm -rf {_FOLDER} && {export}"]
