"""agl_sinks: shows runs of agl in other systems."""
