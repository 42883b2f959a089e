"""Checks of a loss's or an estimator's parameters, with messages for the person who wrote them."""

from __future__ import annotations

from agl.errors import ConfigError


def at_least_zero(name: str, **values: float) -> None:
    """Raise ConfigError naming the values that are below 0 or no numbers."""
    wrong = {key: value for key, value in values.items() if not value >= 0}
    if wrong:
        raise ConfigError(f"The loss {name} got {wrong}; give numbers of at least 0.")


def above_zero(name: str, **values: float) -> None:
    """Raise ConfigError naming the values that are not above 0."""
    wrong = {key: value for key, value in values.items() if not value > 0}
    if wrong:
        raise ConfigError(f"The loss {name} got {wrong}; give numbers above 0.")


def off_or_above_one(name: str, **ratios: float) -> None:
    """Raise ConfigError naming the ratios that are neither 0, which means off, nor above 1."""
    wrong = {key: value for key, value in ratios.items() if value and not value > 1}
    if wrong:
        raise ConfigError(f"The loss {name} got {wrong}; give a ratio above 1 such as 3.0, or 0 for none.")
