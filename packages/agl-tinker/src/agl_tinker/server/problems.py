"""The errors with which the server refuses requests."""


class RefusedError(Exception):
    """A request is refused, with an HTTP status and a text that says why and what to do.

    The published client repeats a request after the statuses 400, 408, 409, 429 and 5xx. A request that would fail
    again is therefore refused with another status.
    """

    def __init__(self, text: str, *, status: int = 422) -> None:
        super().__init__(text)
        self.status = status


def not_offered(what: str) -> RefusedError:
    """Return the refusal of a part of Tinker's API that this server does not offer."""
    return RefusedError(
        f"{what} is not offered by this server. It has sampling, forward, forward_backward, optim_step, and the saving "
        "and loading of weights and state, for LoRA on one base model."
    )
