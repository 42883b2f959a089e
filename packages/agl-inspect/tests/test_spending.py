import asyncio

from agl.acceptance import error_for
from agl.contracts import Store
from agl.stores import MemoryStore
from agl_inspect.records.spending import spend


async def spent(store: Store, *comparisons: str, resource: str = "prompt", label: str = "production") -> list[float]:
    return [await spend(store, resource, label, each, error=0.05) for each in comparisons]


def test_comparison_keeps_its_share_of_the_error() -> None:
    async def body() -> list[float]:
        store = MemoryStore()
        return [
            *await spent(store, "v2 against v1", "v3 against v1"),
            *await spent(store, "v2 against v1", "v4 against v3"),
        ]

    assert [error_for(number, error=0.05) for number in (1, 2, 1, 3)] == asyncio.run(body())


def test_each_label_has_an_error_of_its_own() -> None:
    async def body() -> list[float]:
        store = MemoryStore()
        first = await spent(store, "v2 against v1")
        return [*first, *await spent(store, "v3 against v1", label="beta"), *await spent(store, "t", resource="tools")]

    assert [error_for(1, error=0.05)] * 3 == asyncio.run(body())


def test_comparisons_that_begin_together_share_no_number() -> None:
    async def body() -> tuple[list[float], list[float]]:
        store, names = MemoryStore(), [f"v{number} against v1" for number in range(6)]
        found = await asyncio.gather(*(spent(store, name) for name in names))
        return [share for (share,) in found], await spent(store, *names)

    shares, again = asyncio.run(body())

    assert (6, shares) == (len(set(shares)), again)
