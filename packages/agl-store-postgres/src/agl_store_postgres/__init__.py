"""The stores ``postgresql://`` and ``postgres://``: one PostgreSQL schema, for many machines at once."""
