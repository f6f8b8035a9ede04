"""For `docker ps` and compose: exit 0 while the service of this container is ready (`/readyz` of the metrics port)."""

import os
import sys
import urllib.error
import urllib.request

url = f"http://127.0.0.1:{os.environ.get('RYZANSTEIN_METRICS_PORT', '9100')}/readyz"
try:
    urllib.request.urlopen(url, timeout=2).close()
except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
    sys.exit(f"{url}: {error}")
