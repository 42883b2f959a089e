"""What the sessions of ``noxfile.py`` are made of; nothing here is part of a package."""
