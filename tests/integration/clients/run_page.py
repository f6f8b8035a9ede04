"""Run a page's blocks of Python in one namespace, one after the other: `run_page.py PAGE HTTP_PORT GRPC_PORT`."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
from pathlib import Path
from typing import Any


async def main(text: str) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        code = compile(block, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = eval(code, names)
        if inspect.isawaitable(running):
            await running


if __name__ == "__main__":
    page, http_port, grpc_port = sys.argv[1:]
    asyncio.run(main(Path(page).read_text().replace(":8000", f":{http_port}").replace(":8001", f":{grpc_port}")))
