"""What a plugin author tests with: a scripted model server, pytest fixtures, one conformance class per contract."""
