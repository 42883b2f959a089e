"""Keeps the pauses of Python's garbage collection short in programs that answer calls or run many agents at once.

A full collection walks through every object that can hold others, those of all imported modules too, and the event
loop stands still meanwhile: 75 to 100 ms at a time in a gateway of 1,000 agents, which was most of what its slowest
calls waited for. Nearly all of these objects live as long as the program.
"""

import gc

_FULL_AFTER = 100
"""Collections of the middle generation before a full one; Python's own default is 10."""


def settle_heap() -> None:
    """Leave all that exists now out of later collections, and collect in full less often.

    Call it once, when a program has started, and only in a program that owns its process. Garbage in cycles that lives
    for long is found later than by default; what is counted down to zero is freed at once as ever.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _FULL_AFTER)
