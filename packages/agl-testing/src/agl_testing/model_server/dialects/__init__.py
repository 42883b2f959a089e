"""The wire formats: each module turns requests into turns, and exchanges into bodies and streamed events."""
