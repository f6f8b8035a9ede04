"""The page at /: its files are the package's, and a setting takes it away. What it does is in tests/e2e."""

from __future__ import annotations

from tests.integration.gateway.gateways import running_stack


async def test_a_setting_takes_the_page_away() -> None:
    for on, status in ((True, 200), (False, 404)):
        async with running_stack([], playground=on) as stack:
            for path in ("/", "/playground/page.js"):
                assert (await stack.http.get(path)).status_code == status
