"""``agl learn``."""

import click


@click.group()
def learn() -> None:
    """Learn from served conversations."""
