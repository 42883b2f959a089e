"""Guards the lines of VERL that are replaced at run time: a VERL without them is refused."""

from __future__ import annotations

import inspect
from typing import Any

from agl_algo_verl.runtime import INSTALL, check_version


def expect_line(place: Any, line: str) -> None:
    """Raise RuntimeError unless the source of `place` has `line`, and ConfigError for another version of VERL."""
    check_version()
    if line not in inspect.getsource(place):
        raise RuntimeError(
            f"agl-algo-verl replaces {line} in {place.__module__}, and this VERL has no such line. Run: {INSTALL}"
        )
