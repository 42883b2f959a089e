"""Imported by VERL before it builds a model on the CPU (`model.external_lib`): a replica, a seed and a repair.

It registers the replica `agl_hf`, lets a frozen reference keep its weights in ordinary memory (`privates.py`), and
seeds torch so that adapters always start from the same numbers.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from agl_algo_verl.privates import register_replica, repair_pinned_memory

register_replica()
repair_pinned_memory()
cast("Any", torch).manual_seed(0)
