"""A hard, pre-paid budget: only reserved amounts can be spent, so nothing overshoots.

It has four currencies: rollouts of the agent, calls of the optimiser's model, its tokens, and money. A reservation
takes the highest possible cost, and the unused part is refunded. At any time

    spent + open reservations + rollouts held back <= limit        in every currency that has a limit
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from agl.schemas import Json, Record

Currency = Literal["rollouts", "calls", "tokens", "money"]
CURRENCIES: tuple[Currency, ...] = ("rollouts", "calls", "tokens", "money")


Price = Annotated[float, Meta(ge=0)]
Limit = Annotated[int, Meta(ge=0)] | None


class Settings(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the settings tables; an unknown key is an error."""


class Prices(Settings, frozen=True, kw_only=True):
    """Prices in a unit of money of the user's choice.

    Attributes:
        input: Price of a million tokens that the optimiser's model reads.
        output: Price of a million tokens that the optimiser's model writes.
        rollout: Price of one rollout of the agent.
    """

    input: Price = 0.0
    output: Price = 0.0
    rollout: Price = 0.0


class BudgetLimits(Settings, frozen=True, kw_only=True):
    """The maximum amounts that may be spent; ``None`` for no limit.

    Attributes:
        rollouts: Rollouts started, those that infrastructure broke included.
        calls: Answers of the optimiser's model, unusable ones included.
        tokens: Tokens that the optimiser's model reads and writes.
        money: Money, in the unit of the prices.
        prices: The prices; required with a limit in money.
    """

    rollouts: Limit = None
    calls: Limit = None
    tokens: Limit = None
    money: Price | None = None
    prices: Prices = Prices()

    def __post_init__(self) -> None:
        if self.money is not None and self.prices == Prices():
            raise ValueError(
                "the budget has money and no prices; set prices = { input = ..., output = ..., rollout = ... } in it: "
                "per million tokens of the optimiser's model, and per rollout"
            )


class Spent(Record, frozen=True, kw_only=True):
    """The amounts spent; :class:`BudgetLimits` describes the fields."""

    rollouts: int = 0
    calls: int = 0
    tokens: int = 0
    money: float = 0.0

    def plus(self, other: "Spent") -> "Spent":
        """Return the sum of two amounts."""
        return Spent(**{name: getattr(self, name) + getattr(other, name) for name in CURRENCIES})


class BudgetExhaustedError(Exception):
    """Raised if a reservation would exceed the budget; it is caught within this package and ends the search.

    Attributes:
        currency: The currency whose limit would be exceeded.
    """

    def __init__(self, currency: Currency, text: str) -> None:
        super().__init__(text)
        self.currency = currency


class Budget:
    """Reserves the highest possible cost of an operation before it starts, and counts its actual cost.

    Args:
        limits: The ceilings.
        spent: The amounts spent so far, from a saved state.
        kept: Rollouts held back for the end, until :meth:`release`.
    """

    def __init__(self, limits: BudgetLimits, *, spent: Spent | None = None, kept: int = 0) -> None:
        self.limits, self.prices = limits, limits.prices
        self._spent = spent or Spent()
        self._kept = kept

    @property
    def spent(self) -> Spent:
        """The amounts spent, open reservations included."""
        return self._spent

    def release(self, *, keeping: int = 0) -> None:
        """Make the rollouts that were held back available, except for ``keeping`` rollouts."""
        self._kept = keeping

    def rollouts_left(self) -> int | None:
        """Return the number of rollouts that may still be started now; ``None`` without a limit."""
        left: list[int] = []
        if self.limits.rollouts is not None:
            left.append(self.limits.rollouts - self._spent.rollouts)
        if self.limits.money is not None and self.prices.rollout:
            # Rounded down to whole rollouts; 1e-9 prevents 0.3 / 0.1 from being 2.
            left.append(int((self.limits.money - self._spent.money) / self.prices.rollout + 1e-9))
        # The tighter limit counts, less the rollouts held back; a run resumed with a lower budget may be below 0.
        return max(0, min(left) - self._kept) if left else None

    def take_rollouts(self, count: int) -> None:
        """Pay for rollouts before they start, for all or none; raises :class:`BudgetExhaustedError`."""
        left = self.rollouts_left()
        if left is not None and count > left:
            raise BudgetExhaustedError("rollouts", f"rollouts needed: {count}, and left in the budget: {left}")
        self._add(rollouts=count, money=count * self.prices.rollout)

    def take_call(self, *, max_input: int, max_output: int) -> Spent:
        """Reserve one call of the optimiser's model; returns the reservation for :meth:`settle_call`.

        Args:
            max_input: The most tokens that the request can have.
            max_output: The most tokens that the answer can have.

        Raises:
            BudgetExhaustedError: One of the currencies has no room for the call; nothing was reserved.
        """
        cost = self._token_cost(max_input, max_output)
        wanted = Spent(calls=1, tokens=max_input + max_output, money=cost)
        for name in CURRENCIES:
            limit = getattr(self.limits, name)
            # The final measurement's rollouts cost money too, which requests must not use up.
            held = self._kept * self.prices.rollout if name == "money" else 0
            if limit is not None and getattr(wanted, name) + getattr(self._spent, name) + held > limit + 1e-9:
                raise BudgetExhaustedError(name, f"the budget of {limit:g} {name} has no room for another call")
        self._add(calls=1, tokens=wanted.tokens, money=cost)
        return wanted

    def settle_call(self, reserved: Spent, *, input_tokens: int, output_tokens: int) -> Spent:
        """Refund the unused part of a call's reservation; returns the actual cost."""
        paid = Spent(calls=1, tokens=input_tokens + output_tokens, money=self._token_cost(input_tokens, output_tokens))
        self._add(tokens=paid.tokens - reserved.tokens, money=paid.money - reserved.money)
        return paid

    def cancel_call(self, reserved: Spent) -> None:
        """Refund the whole reservation of a call, because the model was not asked or refused to answer."""
        self._add(calls=-reserved.calls, tokens=-reserved.tokens, money=-reserved.money)

    def dump(self) -> Json:
        """Return the amounts spent, as JSON."""
        return msgspec.to_builtins(self._spent)

    def load(self, data: Json) -> None:
        """Restore the amounts from :meth:`dump`."""
        self._spent = msgspec.convert(data, Spent)

    def _token_cost(self, input_tokens: int, output_tokens: int) -> float:
        return (input_tokens * self.prices.input + output_tokens * self.prices.output) / 1e6  # prices are per million

    def _add(self, *, rollouts: int = 0, calls: int = 0, tokens: int = 0, money: float = 0.0) -> None:
        self._spent = self._spent.plus(Spent(rollouts=rollouts, calls=calls, tokens=tokens, money=money))
