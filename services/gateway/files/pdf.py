"""The text of a PDF: `python -m services.gateway.files.pdf`, from standard input to standard output.

A PDF may make its reader loop or fill the memory. So it is read by a process of its own, which has limits on both.
"""

from __future__ import annotations

import io
import resource
import sys

from pypdf import PdfReader
from pypdf.errors import FileNotDecryptedError

from services.gateway.files.pdf_limits import ENCRYPTED, MAX_CHARS, TOO_LONG

_MEMORY_BYTES = 384 * 1024 * 1024
_CPU_S = 20


def main() -> int:
    """Write the text of the pages; returns the exit status."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    reader = PdfReader(io.BytesIO(sys.stdin.buffer.read()))
    left = MAX_CHARS
    try:
        if reader.is_encrypted:
            reader.decrypt("")  # many are for all to read
        for page in reader.pages:
            text = page.extract_text().strip() + "\n\n"
            left -= len(text)
            if left < 0:
                return TOO_LONG
            sys.stdout.buffer.write(text.encode(errors="replace"))
    except FileNotDecryptedError:
        return ENCRYPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
