"""``agl show --steps``: the steps of a run, each on the line that ``agl run`` printed when it ended."""

from collections.abc import Iterator

from agl.contracts import Store
from agl.schemas import Json
from agl_inspect.advice.suggestions import VALIDATE
from agl_inspect.records.metrics import LoggedRun, place_of, read_runs
from agl_inspect.records.step_lines import step_line, version_of_step


async def read_steps(store: Store, experiment: str | None, run: int | None) -> list[dict[str, Json]]:
    """Read the steps of an experiment in the order in which they ended, as mappings for a program to read.

    Args:
        store: Where to look.
        experiment: Its name; ``None`` for the only one that has metrics.
        run: The run, 0 for all, ``None`` for the newest.

    Raises:
        ConfigError: There is no such experiment or run, or it has no metrics; says which there are.
    """
    runs = await read_runs(store, (experiment,) if experiment else (), run, None, ())
    newest = await store.resources()
    versions = {version.version for each in newest for version in await store.resources(each.name)}
    return [step for each in runs for step in _steps(each, versions)]


def _steps(logged: LoggedRun, versions: set[str]) -> Iterator[dict[str, Json]]:
    places: dict[tuple[str, int], int] = {}
    numbers: dict[tuple[str, int], dict[str, float]] = {}
    for metric in logged.found:
        key = (metric.algorithm, metric.step)
        places[key] = place_of(metric)
        numbers.setdefault(key, {})[metric.name] = metric.value
    for name, step in sorted(numbers, key=lambda key: (places[key], key[0] == VALIDATE, key)):
        found = numbers[name, step]
        metrics = {key: found[key] for key in sorted(found, key=lambda key: (key != "reward", key))}
        version = version_of_step(logged.experiment, logged.run, name, step)
        line = step_line(name, step, metrics=metrics, has_published=version in versions)
        yield {
            "experiment": logged.experiment,
            "run": logged.run,
            "algorithm": name,
            "step": step,
            "experiment_step": places[name, step],
            "line": line,
            "metrics": dict(metrics),
        }
