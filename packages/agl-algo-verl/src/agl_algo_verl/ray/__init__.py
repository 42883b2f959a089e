"""VERL's own trainer on a Ray cluster; agl supplies the rows."""
