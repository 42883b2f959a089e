"""Reports the gateway's state to operators: health, metrics, and the description of its API."""
