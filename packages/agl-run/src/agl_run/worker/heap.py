"""Keeps the pauses of Python's garbage collection short in programs that answer calls or run many agents at once.

A full collection walks through every object that can hold others, those of all imported modules too, and the event
loop stands still meanwhile: 75 to 100 ms at a time in a gateway of 1,000 agents, which was most of what its slowest
calls waited for. Nearly all of these objects live as long as the program.
"""

import gc

_MIDDLE_AFTER = 3
"""Collections of the youngest objects before one of the middle generation; Python's 10 let 20 to 30 ms add up."""

_FULL_AFTER = 300
"""Collections of the middle generation before a full one; Python's own default is 10."""


def settle_heap() -> None:
    """Leave all that exists now out of later collections, and collect more often in small and less often in full.

    Call it once, when a program has started, and only in a program that owns its process. Garbage in cycles that lives
    for long is found later than by default; what is counted down to zero is freed at once as ever.
    """
    # Collected first, because whatever is garbage now would stay for ever once it is frozen.
    gc.collect()
    gc.freeze()
    # The first threshold stays: young garbage is the cheapest.
    gc.set_threshold(gc.get_threshold()[0], _MIDDLE_AFTER, _FULL_AFTER)
