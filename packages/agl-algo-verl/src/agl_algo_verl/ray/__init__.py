"""VERL's own trainer on a Ray cluster, fed with rows by agl."""
