"""The wire formats: each module converts requests to turns, and exchanges to response bodies and streamed events."""
