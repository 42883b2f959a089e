"""Parts of the sessions in ``noxfile.py``, and tools that keep the repository in order; no part of a package."""
