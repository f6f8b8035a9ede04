"""For `docker ps` and compose: exit 0 while the service of this container is ready.

``healthcheck.py [PORT]`` asks `/readyz` of the port, by default of the one for metrics.
"""

import os
import sys
import urllib.error
import urllib.request

port = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("RYZANSTEIN_METRICS_PORT", "9100")
url = f"http://127.0.0.1:{port}/readyz"
try:
    urllib.request.urlopen(url, timeout=2).close()
except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
    sys.exit(f"{url}: {error}")
