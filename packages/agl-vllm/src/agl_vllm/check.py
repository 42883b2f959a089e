"""After every weight update: does the server find a text as probable as the weights do?

A server's success is no proof: a reload that answered 200 and left wrong logits has been measured.
"""

from collections.abc import Sequence
from pathlib import Path

from agl.errors import PolicyError
from agl.schemas import PROBE_FILE, Weights, WeightsProbe, read_probe
from agl_vllm.client import ServerClient

FLOAT32_TOLERANCE = 1e-3
TOLERANCE = 0.05
"""Mean difference in nats that half-precision rounding may cause between two engines."""


def probe_of(weights: Weights, *, name: str) -> WeightsProbe:
    """The probe beside the weights; raises :class:`PolicyError` where there is none."""
    probe = read_probe(Path(weights.uri))
    if probe is None:
        raise PolicyError(
            f"policy {name!r}: the weights in {weights.uri} have no {PROBE_FILE}, so nothing can tell whether a server "
            "serves them; publish them with an algorithm that writes it (those of agl-algo-torch do), or set "
            "probe = false to serve them unchecked"
        )
    return probe


async def check_served(
    client: ServerClient, probe: WeightsProbe, *, name: str, model: str, version: str, tolerance: float
) -> float:
    """Compare what the server serves as ``model`` with the probe; returns the mean difference in nats.

    Raises:
        PolicyError: It is above ``tolerance``; names both values of the worst token, and their means.
    """
    served = await client.score(probe.token_ids, model=model)
    differences = [abs(a - b) for a, b in zip(served, probe.logprobs, strict=True)]
    difference = _mean(differences)
    if difference <= tolerance:
        return difference
    worst = max(range(len(differences)), key=differences.__getitem__)
    raise PolicyError(
        f"policy {name!r}: the server at {client.base_url} said that it had taken the weights {version!r}, and does "
        f"not serve them: token {probe.token_ids[worst + 1]} at place {worst + 1} of the probe has log-probability "
        f"{served[worst]:.4f} there and {probe.logprobs[worst]:.4f} by the weights (means {_mean(served):.4f} and "
        f"{_mean(probe.logprobs):.4f}; mean difference {difference:.4f}, tolerance {tolerance:g}). "
        'Training on its answers would be wrong; use sync = "restart" with a server that agl starts, or raise '
        "probe_tolerance if the server computes in another precision"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
