"""The actions of the console: the fields, the description and the outcome of each.

Every action goes through the store's contract or the code behind the command line. ``describe`` refuses an impossible
action before it is confirmed, and ``perform`` checks again, because the store may have changed in between.
"""

import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from agl import semconv
from agl.contracts import Store
from agl.errors import ConfigError, NotFoundError
from agl.schemas import Record, Reward, Rollout, Span
from agl_console.reading import NOTE, rollout_of
from agl_inspect.records.labels import LABEL, label_path, labelled, move, move_back
from agl_inspect.rollouts.span_reader import read_episode
from agl_inspect.terminal.query import is_counted
from agl_inspect.text import visible
from agl_inspect.versions import list_versions

Text = Annotated[str, msgspec.Meta(max_length=10_000)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Field(NamedTuple):
    """An input of an action's form; it is a text area if ``lines`` is above 1."""

    name: str
    label: str
    default: str = ""
    is_needed: bool = False
    lines: int = 1


class Done(NamedTuple):
    """The outcome of an action as text, and the address, in parts, of the page that shows the result."""

    text: str
    address: tuple[str, ...]


class Action(Protocol):
    """An action that the console offers. The fields of the class become the inputs of its HTML form."""

    def back(self) -> tuple[str, ...]:
        """Return the parts of the address of the page that offers the action."""
        ...

    async def describe(self, store: Store) -> tuple[list[str], dict[str, str]]:
        """Return sentences that describe the effect, and the state that they rely on, as hidden fields of the form.

        The field ``seen`` is passed to ``perform``.

        Raises:
            AglError: The action is impossible; the message gives the reason and the next step.
        """
        ...

    async def perform(self, store: Store, *, seen: str, key: str) -> Done:
        """Perform the action once; raises as :meth:`describe` does.

        ``key``, 16 hex digits, is the same if a form is sent again; ``seen`` is from :meth:`describe`.
        """
        ...


class Promote(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Points a label at a version, like ``agl resources promote``."""

    name: Name
    version: Name
    label: Name = "production"
    reason: Text = ""

    def back(self) -> tuple[str, ...]:
        """Return the address of the resource's page."""
        return ("versions", self.name)

    async def describe(self, store: Store) -> tuple[list[str], dict[str, str]]:
        """Describe the version that the label leaves, and the version that it will point at."""
        present = await self._present(store)
        if present == self.version:
            raise ConfigError(f"the label {self.label!r} of {self.name!r} points at {self.version!r} already")
        now = f"points at the version {present}" if present else "does not exist yet"
        lines = [
            f"The label {self.label} of {self.name} {now}; it will point at the version {self.version}.",
            "Programs that read the label get that version from their next look on. The move is kept, and can be "
            "rolled back.",
        ]
        return lines, {"seen": present}

    async def perform(self, store: Store, *, seen: str, key: str) -> Done:  # moving it twice changes nothing
        """Move the label, unless somebody has moved it since the confirmation page."""
        present = await self._present(store)
        if present != self.version:
            _check_unmoved(self.name, self.label, present, seen)
            await move(store, self.name, self.label, self.version, reason=self.reason)
        return Done(f"{self.name}: {self.label} is now {self.version}", ("versions", self.name))

    async def _present(self, store: Store) -> str:
        if not LABEL.fullmatch(self.label):
            raise ConfigError(f"the label {self.label!r} may hold letters, digits, '_', '.' and '-' only")
        listed = {item.version.version: item for item in await list_versions(store, self.name, has_candidates=True)}
        if self.version not in listed:
            raise NotFoundError("version", f"{self.name}@{self.version}", f"see /versions/{self.name}")
        if not listed[self.version].is_saved:
            raise ConfigError(
                f"{self.name}@{self.version} was served from memory and never written, because save_every lets steps "
                "wait; choose a version that is saved, or set save_every = 1"
            )
        present = await labelled(store, self.name, self.label)
        return "" if present is None else present.version


class Rollback(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Points a label back at its previous version, like ``agl resources rollback``."""

    name: Name
    label: Name

    def back(self) -> tuple[str, ...]:
        """Return the address of the resource's page."""
        return ("versions", self.name)

    async def describe(self, store: Store) -> tuple[list[str], dict[str, str]]:
        """Describe the version that the label leaves, and the version to which it returns."""
        present, previous = await self._path(store)
        lines = [
            f"The label {self.label} of {self.name} points at the version {present}; it will point at the version "
            f"{previous} again.",
            "Programs that read the label get that version from their next look on. The version that it leaves stays.",
        ]
        return lines, {"seen": present}

    async def perform(self, store: Store, *, seen: str, key: str) -> Done:  # ``seen`` prevents a second move
        """Move the label back, unless somebody has moved it since the confirmation page."""
        present, _ = await self._path(store)
        _check_unmoved(self.name, self.label, present, seen)
        made = await move_back(store, self.name, self.label)
        return Done(f"{self.name}: {self.label} is now {made.version} ({made.reason})", ("versions", self.name))

    async def _path(self, store: Store) -> tuple[str, str]:
        """Return the version that the label points at, and the version before it."""
        path = label_path(await store.label_moves(self.name, self.label))
        if not path:
            raise NotFoundError("label", f"{self.name}/{self.label}", f"see /versions/{self.name}")
        if len(path) == 1:
            raise ConfigError(
                f"the label {self.label!r} of {self.name!r} pointed at nothing before {path[-1]!r}; promote a version"
            )
        return path[-1], path[-2]


class Cancel(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cancels a queued or running rollout."""

    rollout: Name

    def back(self) -> tuple[str, ...]:
        """Return the address of the rollout's page."""
        return ("rollouts", self.rollout)

    async def describe(self, store: Store) -> tuple[list[str], dict[str, str]]:
        """Describe the effect on the rollout and its worker."""
        rollout, _ = await rollout_of(store, self.rollout)
        if rollout.is_finished:
            raise ConfigError(f"the rollout {self.rollout} has ended ({rollout.status}); nothing is left to cancel")
        doing = "is queued, and no worker will take it" if rollout.status == "queued" else "runs; its worker stops it"
        lines = [
            f"The rollout {self.rollout} {_of(rollout)} {doing}. It will be cancelled for good.",
            "A step that waits for it goes on without it. What it recorded so far stays.",
        ]
        return lines, {"seen": rollout.status}

    async def perform(self, store: Store, *, seen: str, key: str) -> Done:  # cancelling twice changes nothing
        """Cancel the rollout, unless it has finished in the meantime."""
        (rollout,) = await store.cancel([self.rollout])
        if rollout.status != "cancelled":
            raise ConfigError(f"the rollout {self.rollout} was not cancelled: it has ended ({rollout.status})")
        return Done(f"the rollout {self.rollout} is cancelled", ("rollouts", self.rollout))


class Rate(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adds a person's reward, a note, or both to a rollout that has finished."""

    rollout: Name
    value: float | None = None
    name: Name = ""
    comment: Text = ""

    def back(self) -> tuple[str, ...]:
        """Return the address of the rollout's page."""
        return ("rollouts", self.rollout)

    async def describe(self, store: Store) -> tuple[list[str], dict[str, str]]:
        """Describe the reward or the note, and its effect."""
        rollout = await self._checked(store)
        if self.value is None:
            return [f"The rollout {self.rollout} {_of(rollout)} gets the note “{self.comment}”, and no reward."], {}
        named = f" named {self.name}" if self.name else ""
        said = f", with the comment “{self.comment}”" if self.comment else ""
        lines = [
            f"The rollout {self.rollout} {_of(rollout)} gets the reward {self.value:g}{named} by a person{said}.",
            "Its status stays. A step that has trained on it does not train again; later steps, comparisons and "
            "reports count the reward. It cannot be taken back.",
        ]
        return lines, {"seen": ""}

    async def perform(self, store: Store, *, seen: str, key: str) -> Done:  # the ids of the spans follow from the key
        """Append spans with the reward and the note; their ids follow from ``key``, so a repeated form adds nothing."""
        rollout = await self._checked(store)
        now = time.time_ns()
        reward = Span(
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt_id or "",
            span_id=key,
            name=f"evaluate {self.name}".rstrip(),
            start_ns=now,
            end_ns=now,
            reward=Reward(value=self.value, name=self.name, source="human", feedback=self.comment),
        )
        about = {semconv.MESSAGE: self.comment}
        note = replace(reward, attempt_id="", span_id=key[::-1], name=NOTE, reward=None, attributes=about)
        await store.append_spans([reward] * (self.value is not None) + [note] * bool(self.comment))
        if self.value is None:
            return Done(f"{self.rollout} has the note", ("rollouts", self.rollout))
        rollout, attempts = await rollout_of(store, self.rollout)
        episode, _, _ = await read_episode(store, rollout, attempts)
        counted = "no reward counts" if episode.reward is None else f"the reward that counts is {episode.reward:g}"
        return Done(f"{self.rollout} has the reward {self.value:g}; {counted}", ("rollouts", self.rollout))

    async def _checked(self, store: Store) -> Rollout:
        if self.value is None and not self.comment:
            raise ConfigError("give a reward, a note, or both")
        if self.value is not None and not math.isfinite(self.value):
            raise ConfigError(f"a reward is a finite number, such as 0.5, and not {self.value}")
        rollout, _ = await rollout_of(store, self.rollout)
        if not is_counted(rollout):
            raise ConfigError(f"the rollout {self.rollout} is {rollout.status}; it can be rated once it is finished")
        return rollout


class Kind(NamedTuple):
    """A kind of action: the title, the button's text, the class, and the inputs that a person fills in.

    ``alone`` is the input that needs no confirmation if nothing else is given.
    """

    title: str
    button: str
    form: type[Any]
    fields: Sequence[Field] = ()
    alone: str = ""


KINDS: dict[str, Kind] = {
    "promote": Kind(
        "Promote a version",
        "Promote",
        Promote,
        (Field("label", "Label", "production", is_needed=True), Field("reason", "Reason, for the history")),
    ),
    "rollback": Kind("Roll a label back", "Roll back", Rollback),
    "cancel": Kind("Cancel a rollout", "Cancel the rollout", Cancel),
    "rate": Kind(
        "Rate a rollout, or note something about it",
        "Add it",
        Rate,
        (
            Field("value", "Reward, a number such as 0 or 1"),
            Field("comment", "Note, in which #words are tags", lines=3),
            Field("name", "Name of the reward, where the experiment weighs several; leave it empty otherwise"),
        ),
        alone="comment",
    ),
}
"""The kinds of actions, by the last part of their addresses."""


def _check_unmoved(name: str, label: str, present: str, seen: str) -> None:
    if present != seen:
        raise ConfigError(
            f"the label {label!r} of {name!r} has moved since the question: it points at {present or 'nothing'!r} and "
            f"not at {seen or 'nothing'!r}; look at /versions/{name} and decide again"
        )


def _of(rollout: Rollout) -> str:
    return f"of {visible(rollout.experiment)}" if rollout.experiment else "of no experiment"
