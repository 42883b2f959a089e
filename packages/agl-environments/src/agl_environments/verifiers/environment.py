"""Helpers for tasks, rewards and errors, shared by the two generations of environments in verifiers.

Environments with ``load_environment`` are in :mod:`agl_environments.verifiers.classic`, and environments made of a
taskset in :mod:`agl_environments.verifiers.taskset`. Objects of verifiers have the type ``Any``, so that verifiers is
imported only when an environment is loaded.
"""

import importlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec

from agl.errors import ConfigError, RunError
from agl.schemas import Json, Record, Reward, to_json
from agl_run.programs import LostError


class Model(Record, frozen=True, kw_only=True):
    """The address, key and parameters with which a rollout calls the policy.

    Attributes:
        base_url: Base URL of the API, ending in ``/v1``.
        routed_url: The base URL with the attempt's id in its path, for clients that several attempts share.
        key: The attempt's token, as the API key.
        name: The model's name in requests.
        sampling: Sampling parameters of every call.
    """

    base_url: str
    routed_url: str
    key: str
    name: str
    sampling: dict[str, Json] = {}


def json_tasks(rows: Iterable[Mapping[str, Any]], *, name: str) -> list[Json]:
    """Convert the rows of a dataset to JSON values.

    Raises:
        ConfigError: A row is not JSON; the message names the row and the key.
    """
    return [_json_task(row, f"row {number} of the environment {name!r}") for number, row in enumerate(rows)]


def _json_task(row: Mapping[str, Any], where: str) -> Json:
    try:
        found = cast("dict[str, Json]", msgspec.to_builtins(dict(row)))
        to_json(found)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        wrong = next((key for key, value in row.items() if not _is_json(value)), "?")
        raise ConfigError(
            f"{where} has {wrong!r}, which is not a JSON value ({error}), and tasks are recorded as JSON; let the "
            "environment's dataset hold text or numbers there, and load the rest when the rollout begins"
        ) from None
    return found


def _is_json(value: object) -> bool:
    try:
        to_json(msgspec.to_builtins(value))
    except (TypeError, ValueError, msgspec.MsgspecError):
        return False
    return True


def checked_reward(
    value: float | None, parts: Mapping[str, float | None], weights: Mapping[str, float], *, name: str
) -> Reward | None:
    """Return a reward with its parts; leaves out the weights if the weighted sum of the parts is not the value.

    Raises:
        RunError: The value or a part is not finite.
    """
    wrong = next((f"{part} as {key!r}" for key, part in _numbers(parts, value) if not math.isfinite(part)), "")
    if wrong:
        raise RunError(
            f"the environment {name!r} scored this rollout with {wrong}; correct that reward function so that it "
            "returns a finite number"
        )
    if value is None:
        return None
    total = sum(weight * (parts.get(key) or 0.0) for key, weight in weights.items())
    same = set(weights) <= set(parts) and math.isclose(total, value, rel_tol=1e-6, abs_tol=1e-9)
    return Reward(
        value=value, name=name, dimensions=dict(parts), weights=dict(weights) if same else {}, source="environment"
    )


def _numbers(parts: Mapping[str, float | None], value: float | None) -> Iterator[tuple[str, float]]:
    yield from ((key, part) for key, part in parts.items() if part is not None)
    if value is not None:
        yield "reward", value


def module(path: str) -> Any:
    """Import a module of verifiers.

    Raises:
        ConfigError: The module does not exist, or cannot be imported.
    """
    try:
        return importlib.import_module(path)
    except ImportError as error:
        raise ConfigError(
            f"{path} cannot be imported: {error}; install verifiers in a release that has it: environments with "
            "load_environment need 'verifiers>=0.3,<0.4', tasksets 'verifiers>=0.4'"
        ) from error


INFRASTRUCTURE = frozenset({"InfraError", "TunnelError", "SandboxError", "BrowserSandboxError", "InterceptionError"})
"""Names of verifiers' exceptions that are not the agent's fault."""


def failure(name: str, kind: str, message: str) -> RunError:
    """Return the error to raise for a rollout that an environment ended with an exception.

    ``kind`` is the name of the exception's class; for one in :data:`INFRASTRUCTURE` the error is a ``LostError``.
    """
    text = f"the environment {name!r} failed: {kind}: {message}"
    return LostError(text) if kind in INFRASTRUCTURE else RunError(text)
