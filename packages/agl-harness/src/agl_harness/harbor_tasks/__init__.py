"""Support for Harbor tasks: reads their folders and Dockerfiles, lays out their sandboxes, and runs their tests."""
