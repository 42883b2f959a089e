"""Shows operators how the gateway fares: health, metrics, and the description of its API."""
