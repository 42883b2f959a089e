"""Lets the tests of the repository import its tools."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
