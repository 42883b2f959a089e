"""Support for Harbor tasks: reads task folders and Dockerfiles, lays out sandboxes, and runs the tests."""
