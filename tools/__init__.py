"""What keeps this repository in order: files made from its sources, and the rule on private imports."""
