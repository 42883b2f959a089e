"""Checks that a model server serves the weights it was given, by the log-probabilities of a fixed text.

The exporter of weights writes a file with them beside the weights; the loader compares them with the server's. Some
servers report a reload as successful and go on serving other weights.
"""

from pathlib import Path

import msgspec

from agl.errors import ConfigError
from agl.schemas._base import Record

PROBE_FILE = "probe.json"
"""Name of the file in a directory of weights."""


class WeightsProbe(Record, frozen=True, kw_only=True):
    """The log-probabilities that weights give to a fixed text.

    Attributes:
        token_ids: The text, [N], N at least 2.
        logprobs: Natural log-probability of every token but the first, given those before it, [N - 1].
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def write_probe(folder: Path, probe: WeightsProbe) -> None:
    """Put the probe beside the weights in ``folder``."""
    (folder / PROBE_FILE).write_bytes(msgspec.json.encode(probe))


def read_probe(folder: Path) -> WeightsProbe | None:
    """The probe beside the weights in ``folder``, ``None`` if there is none.

    Raises:
        ConfigError: The file is not a probe.
    """
    path = folder / PROBE_FILE
    if not path.is_file():
        return None
    try:
        probe = msgspec.json.decode(path.read_bytes(), type=WeightsProbe)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a probe of weights ({error}); export them again, or remove it") from error
    if len(probe.token_ids) < 2 or len(probe.logprobs) != len(probe.token_ids) - 1:
        raise ConfigError(
            f"{path} has {len(probe.token_ids)} tokens and {len(probe.logprobs)} log-probabilities, which must be one "
            "fewer; export the weights again, or remove it"
        )
    return probe
