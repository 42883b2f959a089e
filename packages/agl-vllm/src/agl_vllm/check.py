"""The check after every weight update: the server must find a fixed text as probable as the weights do.

An answer of 200 is no proof: reloads that answered so and left wrong logits have been seen. So the probe that came
with the weights, a text of N tokens with their log-probabilities, is scored by the server and compared:

    difference = mean over the N - 1 tokens after the first of |log p_server - log p_weights|        in nats

The mean and not the largest: rounding moves single unlikely tokens far, and wrong weights move nearly all of them.
"""

from collections.abc import Sequence
from pathlib import Path

from agl.errors import PolicyError
from agl.schemas import PROBE_FILE, Weights, WeightsProbe, read_probe
from agl_vllm.client import ServerClient

FLOAT32_TOLERANCE = 1e-3
TOLERANCE = 0.05
"""Mean differences in nats that rounding may cause between two engines, in float32 and in half precision."""


def probe_of(weights: Weights, *, name: str) -> WeightsProbe:
    """Return the probe beside the weights; raises :class:`PolicyError` where there is none."""
    probe = read_probe(Path(weights.uri))
    if probe is None:
        raise PolicyError(
            f"policy {name!r}: the weights in {weights.uri} have no {PROBE_FILE}, without which nobody can check that "
            "a server serves them; publish them with an algorithm that writes it (those of agl-algo-torch do), or set "
            "probe = false to serve them unchecked"
        )
    return probe


async def check_served(
    client: ServerClient, probe: WeightsProbe, *, name: str, model: str, version: str, tolerance: float
) -> float:
    """Compare what the server serves as ``model`` with the probe; returns the mean difference in nats.

    Raises:
        PolicyError: It is above ``tolerance``; the message names both values of the worst token, and their means.
    """
    served = await client.score(probe.token_ids, model=model)  # [N - 1]
    differences = [abs(a - b) for a, b in zip(served, probe.logprobs, strict=True)]  # [N - 1]
    difference = _mean(differences)  # nan where the server gave nan, which no tolerance lets pass
    if difference <= tolerance:
        return difference
    worst = max(range(len(differences)), key=differences.__getitem__)  # entry i is about token i + 1 of the probe
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
