"""``settle_heap`` excludes existing objects from later garbage collections."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
import time
from agl_run.worker.heap import settle_heap

kept = [[number] for number in range(1_000_000)]

def full():
    began = time.perf_counter()
    gc.collect()
    return time.perf_counter() - began

before = min(full() for _ in range(3))
settle_heap()
after = min(full() for _ in range(3))
cycle = []
cycle.append(cycle)
del cycle
print(gc.get_freeze_count() > 1_000_000, after < before / 5, gc.collect(), gc.get_threshold()[2] > 10)
"""


@pytest.mark.long
def test_full_collections_leave_out_what_existed() -> None:
    """Measure full collections before and after, in a new process, because frozen objects stay frozen."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)

    assert "True True 1 True" == done.stdout.strip()
