"""agl_replay: runs recorded rollouts again, as they were, from one call on, or with other versions and rewards."""
