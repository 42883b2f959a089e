"""The refusals of the server, as its clients get them."""


class RefusedError(Exception):
    """A request that is not served: an HTTP status, and a paragraph that says why and what to do.

    The published client repeats requests that it gets 400, 408, 409, 429 or 5xx for, so other statuses are used here
    for what would fail again.
    """

    def __init__(self, text: str, *, status: int = 422) -> None:
        super().__init__(text)
        self.status = status


def not_offered(what: str) -> RefusedError:
    """Return the refusal of a part of Tinker's API that this server does not have."""
    return RefusedError(
        f"{what} is not offered by this server. It has sampling, forward, forward_backward, optim_step, and the saving "
        "and loading of weights and state, for LoRA on one base model."
    )
