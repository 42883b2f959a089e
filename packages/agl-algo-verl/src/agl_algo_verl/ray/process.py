"""Imported by every process of VERL's cluster that trains on the CPU (VERL_USE_EXTERNAL_MODULES).

It registers the platform and makes two of the repairs in `privates.py`; `ray/preparation.py` makes the others.
"""

from __future__ import annotations

from agl_algo_verl import cpu
from agl_algo_verl.privates import repair_critic, repair_process_group

cpu.register()
repair_process_group()
repair_critic()
