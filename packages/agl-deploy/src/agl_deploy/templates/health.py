"""Exits with 0 if the HTTP server at the URL in the first argument answers, even if it asks for a password."""

import sys
import urllib.error
import urllib.request

try:
    with urllib.request.urlopen(sys.argv[1], timeout=5):
        pass
except urllib.error.HTTPError as error:
    sys.exit(error.code != 401)
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")
