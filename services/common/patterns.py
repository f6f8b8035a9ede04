"""Regular expressions of whole texts, which Python, Rust and ECMAScript read alike."""

from __future__ import annotations

END = r"$(?!\n)"  # in Python `$` alone also matches before a newline at the end
