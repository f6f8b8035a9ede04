"""The tools that a body of Anthropic's offers."""

from __future__ import annotations

from services.gateway.api.decode import converted, unsupported_value
from services.gateway.api.ignored import Ignored
from services.gateway.errors import invalid
from services.gateway.http.messages.schema import ClientTool, CountBody, OneChoice


def read_tools(body: CountBody, ignored: Ignored) -> list[ClientTool]:
    """The tools of a body, without Anthropic's own, which have a type.

    Raises :class:`ApiError` (400), also for a choice that forces a tool that is left out.
    """
    tools: list[ClientTool] = []
    hosted_names = set()
    for index, raw in enumerate(body.tools or ()):
        kind = raw.get("type")
        if kind in (None, "custom"):
            tools.append(converted(raw, ClientTool, f"tools[{index}]", ignored))
        elif isinstance(kind, str):
            ignored.add(f"tools[].type={kind}")
            hosted_names.add(str(raw.get("name")))
        else:
            raise unsupported_value(f"tools[{index}].type", kind, ("custom",))
    if body.mcp_servers:
        ignored.add("mcp_servers")
    choice = body.tool_choice
    if isinstance(choice, OneChoice) and choice.name in hosted_names - {tool.name for tool in tools}:
        message = f"`tool_choice` forces `{choice.name}`, a hosted tool: this server has none, so it is left out."
        raise invalid(message, "tool_choice", "unsupported_value")
    return tools
