"""Records that ``agl data export`` wrote into the free fields of other formats, as an object ``agl``."""

from typing import Any

from agl.errors import DatasetError
from agl.schemas import Json, ModelCall, Reward
from agl_data.importing.values import as_dict
from agl_inspect.exports import call_of_record, reward_of_record


def own_call(place: str, about: Json, *, request: Json, response: Json) -> ModelCall | None:
    """Return the call that agl wrote, ``None`` where it wrote none; raises :class:`DatasetError` for a damaged one."""
    record = as_dict(about).get("call")
    if not record:
        return None
    try:
        return call_of_record(record, request=request, response=response)
    except ValueError as error:
        raise _damaged(place, error) from error


def own_reward(place: str, record: Any) -> Reward:
    """Return the reward that agl wrote; raises :class:`DatasetError` for a damaged one."""
    try:
        return reward_of_record(record)
    except ValueError as error:
        raise _damaged(place, error) from error


def _damaged(place: str, error: ValueError) -> DatasetError:
    return DatasetError(
        f"{place} has a field agl that agl data export did not write so ({error}), and nothing was imported; export "
        "the runs once more, or remove that field"
    )
