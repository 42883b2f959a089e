"""agl_learn: learn from the users of a served agent, and promote what is shown to be better."""
