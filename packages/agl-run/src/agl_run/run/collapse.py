"""Reacts to a fall of the validation reward: goes back to the best versions, stops, or only reports the fall.

A validation has fallen if the gate finds it worse than the best one. The first such validation is reported; if the next
one has fallen too, the reaction in ``on_collapse`` follows, because a single fall may be real and yet pass by itself.
The decision depends only on data in the store, so a run that is killed decides the same when it is resumed.
"""

from collections.abc import Sequence

from agl.acceptance import odds_text
from agl.errors import AglError
from agl.schemas import Record
from agl_inspect.advice.suggestions import Suggestion
from agl_inspect.records.shelf import Shelf, run_key
from agl_inspect.records.validations import Validation
from agl_run.plan import VALIDATION
from agl_run.run.algorithm import DrivenAlgorithm
from agl_run.run.driver import Driver
from agl_run.run.finalists import missing_files

RATE = 0.5
"""Factor by which the step sizes shrink each time that a run goes back to its best versions."""

MOST_BACK = 3
"""The most times that a run goes back to its best versions; after that it stops, as smaller steps do not help."""


class CollapseError(AglError):
    """Stops the experiment because the validation reward collapsed; the message gives the reason."""


class _Rollbacks(Record, frozen=True, kw_only=True):
    """How often the run went back to its best versions, and after how many steps it last did."""

    count: int = 0
    turn: int = -1


class CollapseGuard:
    """Watches the validations of a run. Call ``load`` first, and ``check`` after every validation.

    Args:
        driver: The run.
        turns: The run's algorithms.
    """

    def __init__(self, driver: Driver, turns: Sequence[DrivenAlgorithm]) -> None:
        self._driver, self._turns = driver, turns
        # In the store, since a resumed run must neither forget a rollback nor repeat it.
        self._shelf = Shelf(_Rollbacks, run_key(driver.name, driver.state.run, "rollbacks"))
        self._past = _Rollbacks()

    async def load(self) -> None:
        """Load from the store how often the run has gone back to its best versions."""
        self._past = await self._shelf.get(self._driver.running.store) or self._past

    async def check(self, turn: int) -> None:
        """React if the validation after ``turn`` steps, which is the newest one, has fallen.

        A single fallen validation is only reported; after two in a row, the experiment does what ``on_collapse`` says.

        Raises:
            CollapseError: The experiment must stop.
        """
        # Depends only on data in the store, so a run that was killed here makes the same decision
        # again.
        fallen = self._fallen(turn)
        if not fallen or all(turn.is_finished for turn in self._turns):
            return
        best, last = self._driver.validations.best, fallen[-1]
        odds = odds_text(self._driver.validations.evidence_of_fall(last))
        finding = f"the validation reward has fallen: {last.words}, and {best.words}, evidence {odds}"
        chosen = self._driver.running.plan.config.experiment.on_collapse
        # Training that goes up and down falls once in a while and recovers by itself.
        if len(fallen) == 1:
            self._say(f"{finding}; if the next validation shows that too, {_INTENTIONS[chosen]}")
            return
        # The same collapse, seen again after a restart, raises no second alert.
        key = f"{best.turn}-{self._past.count}"
        try:
            text = await self._react(chosen, best, finding)
        except CollapseError as error:
            # The alert is stored before the run ends, because nothing would write it afterwards.
            await self._alert(f"{error}; the run stops", step=last.turn, key=key)
            raise
        self._say(text)
        await self._alert(text, step=last.turn, key=key)

    async def _react(self, chosen: str, best: Validation, finding: str) -> str:
        """Carry out the reaction ``chosen``, and return a description of it."""
        if chosen == "continue":
            return f'{finding}; training goes on, because on_collapse is "continue"'
        if chosen == "stop":
            raise CollapseError(f"{finding}, twice in a row")
        return await self._go_back(best, finding)

    async def _alert(self, text: str, *, step: int, key: str) -> None:
        found = Suggestion(rule="collapse", algorithm=VALIDATION, step=step, evidence=text, change="")
        await self._driver.alert("collapse", found, key=key)

    def _fallen(self, turn: int) -> list[Validation]:
        """Return the newest validation if it has fallen, after the one before it if that has fallen too.

        Validations from before the last return to the best versions are ignored, because they say nothing about the
        present weights. The list is empty if the newest validation has not fallen.
        """
        # Validations from before the last rollback are no evidence about the present weights.
        since = [one for one in self._driver.validations.all() if one.turn > self._past.turn]
        if not since or since[-1].turn != turn:
            return []
        fallen: list[Validation] = []
        for one in reversed(since[-2:]):
            if not self._driver.validations.has_fallen(one):
                break
            fallen.insert(0, one)
        return fallen

    async def _go_back(self, best: Validation, finding: str) -> str:
        """Make the best versions live, and let the algorithms continue from them with smaller steps."""
        running, states = self._driver.running, self._driver.validations.states
        live = running.live.versions()
        changed = {name for name, version in best.versions.items() if live[name] != version}
        if not changed:
            return f"{finding}, twice in a row, and the versions are the same: something else has changed"
        # Only algorithms that have trained what goes back need to change their optimizer's state.
        affected = [t for t in self._turns if not t.is_finished and t.steps and changed.intersection(t.tunes)]
        # Checked before anything changes: a rollback that failed halfway would mix versions and
        # states.
        obstacle = await self._obstacle(best, affected)
        if obstacle:
            raise CollapseError(f"{finding}, twice in a row; training cannot go back, because {obstacle}")
        # The rate applies to the configured step size, not to the present one, so rollbacks do not
        # multiply twice.
        rate = RATE ** (self._past.count + 1)
        await running.go_back(best.versions)
        went = {turn.name: await turn.go_back(states.get(turn.name), rate=rate) for turn in affected}
        past = _Rollbacks(count=self._past.count + 1, turn=self._driver.state.turn)
        # Versions, states and the count are written together; see the module.
        await self._driver.go_back(went, others=self._shelf.states({"": past}))
        self._past = past
        slower = f"; {' and '.join(went)}: {rate:g} times the configured learning rate" if went else ""
        return f"{finding}, twice in a row: back to the versions {best.place}{slower}"

    async def _obstacle(self, best: Validation, affected: Sequence[DrivenAlgorithm]) -> str:
        """Return the reason why the run cannot go back to the best versions; ``""`` if it can."""
        schedule = self._driver.running.plan.config.schedule
        unfinished = [turn for turn in self._turns if not turn.is_finished and turn.name not in schedule.first]
        if self._past.count >= MOST_BACK:
            return f"it went back {MOST_BACK} times already, and smaller steps did not help"
        if schedule.mode == "concurrent" and len(unfinished) > 1:
            return "other algorithms are in the middle of a step with the schedule concurrent"
        # An algorithm later in the schedule has to be set up before it can say whether it can go
        # back.
        for turn in affected:
            await turn.begin()
        fixed = [turn.name for turn in affected if not turn.can_go_back]
        if fixed:
            return f"{' and '.join(fixed)} cannot continue from an earlier state"
        return await missing_files(self._driver.running.store, best)

    def _say(self, text: str) -> None:
        self._driver.progress.say(text)


_INTENTIONS = {
    "rollback": "training goes back to the best versions with smaller steps, or stops where it cannot",
    "stop": "the run stops",
    "continue": "training goes on all the same",
}
