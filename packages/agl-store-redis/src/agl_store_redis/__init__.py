"""The stores ``redis://``, ``rediss://``, ``valkey://`` and ``valkeys://``: a server's memory."""
