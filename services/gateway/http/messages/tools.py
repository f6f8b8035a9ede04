"""The tools that a body of Anthropic's offers."""

from __future__ import annotations

import re

from services.gateway.api.decode import converted, unsupported_value
from services.gateway.api.ignored import Ignored
from services.gateway.errors import invalid
from services.gateway.http.messages.schema import ClientTool, CountBody, OneChoice

# Tools of Anthropic's own have a date in their type: what they are only its models know.
_HOSTED = re.compile(r"[a-z_]{1,64}_\d{8}|mcp_toolset")


def read_tools(body: CountBody, ignored: Ignored) -> list[ClientTool]:
    """The tools of a body; raises :class:`ApiError` (400), also for a choice that forces one that is left out."""
    tools: list[ClientTool] = []
    hosted_names = set()
    for index, raw in enumerate(body.tools or ()):
        kind = raw.get("type")
        if isinstance(kind, str) and _HOSTED.fullmatch(kind):
            ignored.add(f"tools[].type={kind}")
            hosted_names.add(raw.get("name"))
        elif kind not in (None, "custom"):
            raise unsupported_value(f"tools[{index}].type", kind, ("custom",))
        else:
            tools.append(converted(raw, ClientTool, f"tools[{index}]", ignored))
    choice = body.tool_choice
    if isinstance(choice, OneChoice) and choice.name in hosted_names - {tool.name for tool in tools}:
        message = f"`tool_choice` forces `{choice.name}`, a hosted tool: this server has none, so it is left out."
        raise invalid(message, "tool_choice", "unsupported_value")
    return tools
