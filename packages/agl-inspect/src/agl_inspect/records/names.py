"""Names and suffixes by which experiments, their trials and forks are found again in the store."""

import re

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

MAX_NAME = 80
"""Names of experiments, algorithms and resources, which are parts of ids."""

TRIAL = "-dev"
"""The end of the name of the experiment that a trial by ``agl dev`` is recorded as."""

PROMPT_TRIAL = "-try"
"""The end of the name of the experiment that a trial by ``agl resources try`` is recorded as."""

FORKS = "-fork"
"""The end of the name of the experiment that forks by ``agl replay --fork`` are recorded as."""

ORIGIN = "agl resources try"
"""The origin, in their metadata, of versions that ``agl resources try`` published."""
