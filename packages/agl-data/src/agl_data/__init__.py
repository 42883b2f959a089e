"""agl_data: imports, exports and archives runs, and copies them between stores."""
