from __future__ import annotations

import sys
from pathlib import Path

# The client is a distribution of its own and not installed here.
CLIENT = Path(__file__).resolve().parents[3] / "clients" / "python"
if str(CLIENT) not in sys.path:
    sys.path.insert(0, str(CLIENT))
