"""Ends with 0 while the HTTP server at the URL of the first argument answers, be it that it wants a password."""

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
