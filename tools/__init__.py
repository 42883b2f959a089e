"""What the sessions of ``noxfile.py`` are made of, and what keeps the repository in order; no part of a package."""
