"""The embedded model server: an engine that generates in batches, and the OpenAI-compatible endpoints over it."""
