"""Every error that this package raises on purpose, in one tree.

    AglError
    ├── ConfigError              an experiment file, an argument or an environment variable is wrong
    │   └── DatasetError         a dataset cannot be read; names file and line
    ├── PluginError              a plugin or one of its components cannot be used
    │   ├── MissingExtraError    an extra of the plugin is not installed
    │   ├── UnknownComponentError
    │   ├── DuplicateComponentError
    │   └── BrokenPluginError
    ├── StoreError               the store refused the operation or could not do it
    │   ├── NotFoundError        an id that the store does not know
    │   ├── ConflictError        the same id with other content, or a state that forbids the change
    │   ├── FencedError          the attempt is no longer the caller's
    │   ├── InvalidIdError       an id or a name is empty, too long, or holds what none may hold
    │   ├── InvalidRecordError   a record has a value of a wrong type, or one that no store can hold
    │   ├── InvalidQueryError    a query asks for a page that no store can find
    │   └── SchemaVersionError   the data was written by a newer release
    ├── CaptureError             model calls were not, or could not be, recorded
    │   ├── NoModelCallsError
    │   ├── MissingTokenIdsError
    │   ├── TokenError           an attempt token is malformed, expired or out of scope
    │   └── GatewayLostError     the gateway of an attempt went away, and calls with it
    ├── RunError                 an agent could not be loaded, started or stopped
    │   └── RewardError          a reward emitter raised, or returned something that is not a reward
    ├── PolicyError              a model server could not be started or reached
    └── ExportError              finished rollouts could not be sent to another system

Every message says what was found, where, and what to do next, in one paragraph.
"""

from typing import Any

__all__ = [
    "AglError",
    "BrokenPluginError",
    "CaptureError",
    "ConfigError",
    "ConflictError",
    "DatasetError",
    "DuplicateComponentError",
    "ExportError",
    "FencedError",
    "GatewayLostError",
    "InvalidIdError",
    "InvalidQueryError",
    "InvalidRecordError",
    "MissingExtraError",
    "MissingTokenIdsError",
    "NoModelCallsError",
    "NotFoundError",
    "PluginError",
    "PolicyError",
    "RewardError",
    "RunError",
    "SchemaVersionError",
    "StoreError",
    "TokenError",
    "UnknownComponentError",
]


class AglError(Exception):
    """The base class of all errors that agl raises on purpose."""


class ConfigError(AglError):
    """A setting is wrong; raised before the first rollout."""


class DatasetError(ConfigError):
    """A dataset cannot be read; the message names the file and the line."""


class PluginError(AglError):
    """A plugin cannot be used; the message names distribution, version and remedy."""


class MissingExtraError(PluginError):
    """A component belongs to an extra of its distribution that is not installed."""


class UnknownComponentError(PluginError):
    """No plugin registers a component of that name."""


class DuplicateComponentError(PluginError):
    """Two plugins register one component name; both distributions are named."""


class BrokenPluginError(PluginError):
    """The plugin that holds the component failed to load."""


class StoreError(AglError):
    """The store refused the operation or could not do it."""


class NotFoundError(StoreError):
    """The store does not know an id.

    Attributes:
        kind: The kind of thing, such as ``rollout``.
        key: The unknown id.
        is_damaged: Whether the store has a record with this id that cannot be read; :meth:`Store.delete` removes it.
    """

    def __init__(self, kind: str, key: str, hint: str = "", *, is_damaged: bool = False) -> None:
        found = f"the record of {kind} {key!r} cannot be read" if is_damaged else f"unknown {kind} {key!r}"
        super().__init__(found + (f"; {hint}" if hint else ""))
        self.kind = kind
        self.key = key
        self.is_damaged = is_damaged
        self._hint = hint

    # Exception's own pickling calls the class with its message, which is one argument where this
    # takes two.
    def __reduce__(self) -> tuple[Any, ...]:
        """Return the constructor's arguments for pickle, so that the error can be sent to another process."""
        return type(self), (self.kind, self.key, self._hint), vars(self)


class ConflictError(StoreError):
    """The same id came with other content, or the state forbids the change."""


class FencedError(StoreError):
    """The attempt was lost or already decided, or another process took over; the late write was refused."""


class InvalidIdError(StoreError):
    """An id or a name is empty, longer than 256 characters, or holds a slash or a control character."""


class InvalidRecordError(StoreError):
    """A record that is written has a value of a wrong type, or one that no store can hold."""


class InvalidQueryError(StoreError):
    """A query asks for an impossible page, with a number that no store can hold or a value of a wrong type."""


class SchemaVersionError(StoreError):
    """The data was written by a newer release than the reader's."""


class CaptureError(AglError):
    """Model calls were not, or could not be, recorded."""


class NoModelCallsError(CaptureError):
    """A rollout finished and no model call was seen."""


class MissingTokenIdsError(CaptureError):
    """A backend returned no token ids although an algorithm needs them."""


class TokenError(CaptureError):
    """An attempt token is malformed, expired, forged or out of scope."""


class GatewayLostError(CaptureError):
    """The gateway went away while an attempt ran. Calls may be missing, so the attempt must be repeated."""


class RunError(AglError):
    """An agent could not be loaded, started or stopped."""


class RewardError(RunError):
    """A reward emitter raised, or returned something that is not a reward.

    The attempt failed although its agent succeeded. The traceback in the attempt's error includes the emitter's error.
    """


class PolicyError(AglError):
    """A model server could not be started or reached."""


class ExportError(AglError):
    """Finished rollouts could not be sent to another system.

    Attributes:
        is_passing: Whether the same rollouts may be accepted later, as after a lost connection.
        retry_after_s: Seconds that the other system asks to wait before the next try; 0 if it names none.
    """

    def __init__(self, message: str, *, is_passing: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.is_passing = is_passing
        self.retry_after_s = retry_after_s


def describe(error: BaseException) -> str:
    """Format an exception as one phrase: its type and message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
