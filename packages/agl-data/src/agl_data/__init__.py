"""agl_data: brings runs in, writes them out, and keeps them elsewhere."""
