"""How probable a model finds a fixed text, for whoever serves its weights elsewhere to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from agl.schemas import WeightsProbe

if TYPE_CHECKING:
    from agl_algo_torch.model import LoadedModel

_TEXT = "Seven times eight is fifty-six: 7*8=56. A list in Python, [1, 2, 3], has three items."
_MOST_TOKENS = 48
_FEWEST_TOKENS = 8


@torch.no_grad()
def make_probe(loaded: LoadedModel) -> WeightsProbe | None:
    """Return the log-probabilities of a fixed text, adapters included; None where the tokenizer cannot write it.

    One forward pass of 48 tokens at most, in evaluation mode; the model's own mode comes back.
    """
    token_ids = list(loaded.tokenizer.encode(_TEXT, add_special_tokens=False))[:_MOST_TOKENS]
    if len(token_ids) < _FEWEST_TOKENS:
        return None
    model = cast("Any", loaded.model)
    was_training = model.training
    model.eval()
    try:
        ids_T = torch.tensor(token_ids, device=loaded.device)
        logp_TV = model(input_ids=ids_T[None]).logits[0, :-1].float().log_softmax(-1)
    finally:
        model.train(was_training)
    logp_T = logp_TV.gather(-1, ids_T[1:, None])[:, 0]
    return WeightsProbe(token_ids=tuple(token_ids), logprobs=tuple(logp_T.tolist()))
