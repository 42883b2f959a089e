"""Imported by VERL before it builds a model (`model.external_lib`): its training workers.

No setting of VERL reaches the class of the model that a worker trains, so `privates.use_loss_worker` replaces it by
`ClusterWorker`, which reads the loss from VERL's own configuration and the updates from the rows (`loss_worker.py`). In
the process of VERL's trainer it replaces the critic's by `ClusterCritic`. A process with neither, such as a server's,
stays as it is.
"""

from __future__ import annotations

from agl_algo_verl.privates import use_loss_worker

use_loss_worker()
