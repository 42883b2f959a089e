"""agl_ray: an experiment's agents and algorithms on a Ray cluster; registered by name, with nothing to import."""
