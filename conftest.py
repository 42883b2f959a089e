"""Settings of all tests: coroutines are tests, property tests have no time limit, and certificates are read once.

The tests of stores that take many seconds for each store are long ones.
"""

import asyncio
import inspect
import os
import ssl
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("AGL_EXAMPLES", "30"))
"""Examples of a property test; ``nox -s everything`` tries 100."""

TEST_LIMIT_S = 600.0
"""Seconds that a coroutine test may take; the mark ``timeout`` gives it another limit."""

# On a busy machine, a limit per example fails for no fault of the code.
settings.register_profile("patient", deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

LONG = ("test_acknowledged_writes_survive_kill_9", "test_no_operation_costs_more_in_a_large_store")
"""Tests of agl-testing, which cannot carry a mark that only this repository knows."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long ones."""
    for item in items:
        if item.name.partition("[")[0] in LONG:
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each coroutine test in a new event loop, with a time limit unless it is a soak test."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    marked = pyfuncitem.get_closest_marker("timeout")
    is_soak = pyfuncitem.get_closest_marker("soak") is not None
    limit_s = marked.args[0] if marked else None if is_soak else TEST_LIMIT_S
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), limit_s))
    return True


_create = ssl.create_default_context


@cache
def _shared(cafile: str | None, *_version: object) -> ssl.SSLContext:
    return _create(cafile=cafile)


def _create_or_share(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **options: str | None) -> ssl.SSLContext:
    """Return a client's context, which all clients share: reading the system's certificates takes each 30 ms."""
    if purpose is not ssl.Purpose.SERVER_AUTH or options.keys() - {"cafile"}:
        return _create(purpose, **options)
    cafile = options.get("cafile")
    changed = os.path.getmtime(cafile) if cafile else 0.0
    return _shared(cafile, changed, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


ssl.create_default_context = _create_or_share
