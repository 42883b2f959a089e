"""Divides the error of all promotions of a label among their comparisons, and saves which share each one has.

A rule that errs in one of twenty comparisons promotes a version that is no better in most series of fifty versions. So
the promotions of a label have one error together, and each new comparison gets a smaller share of it.
"""

from agl.acceptance import error_for
from agl.contracts import Store
from agl_inspect.records.shelf import Shelf


async def spend(store: Store, resource: str, label: str, comparison: str, *, error: float) -> float:
    """Return the share of the error that a comparison may spend, which is the same each time.

    Args:
        store: The store that numbers the comparisons in the order in which they are first made.
        resource: The resource whose versions are compared.
        label: The label that moves if the new version is better.
        comparison: What is compared, such as ``v2 against v1``.
        error: The largest probability that any promotion of the label is to a version that is no better.
    """
    shelf = Shelf(int, f"spent/{resource}/{label}/")
    while True:
        numbers = await shelf.read(store)
        number = numbers.get(comparison)
        tied = sorted(each for each in numbers if numbers[each] == number)
        if number is not None and tied == [comparison]:
            return error_for(number, error=error)
        # It is new, or another process took the same number: then both take new ones, in the order of their names.
        rank = tied.index(comparison) if tied else 0
        await shelf.add(store, {comparison: max(numbers.values(), default=0) + 1 + rank})
