"""VERL's configuration keys: read, checked, and explained where they cannot be used."""
