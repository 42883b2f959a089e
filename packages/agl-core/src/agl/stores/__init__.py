"""The core's own stores, ``memory://`` and ``sqlite:///``, and the parts that every store is made of."""
