"""langgraph: a graph with a model, a tool node and a memory; text, streams, errors."""

import sys

import openai
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, Field

ASK = "How warm is it in Rome?"
options = {"base_url": f"{sys.argv[1]}/v1", "api_key": "unused", "max_retries": 0}
llm = ChatOpenAI(**options, model="ryzanstein-tiny", temperature=0, max_tokens=300)


class City(BaseModel, extra="forbid"):
    """Where."""

    city: str = Field(max_length=12)


@tool(args_schema=City)
def get_weather(city: str) -> str:
    """How warm it is in a city."""
    return f"21 degrees in {city}"


must = llm.bind_tools([get_weather], tool_choice="get_weather", strict=True)
short = llm.bind(max_tokens=20)


def call(state: MessagesState) -> dict:
    """The model's turn: it calls the tool once, then it answers."""
    answered = any(isinstance(message, ToolMessage) for message in state["messages"])
    return {"messages": [(short if answered else must).invoke(state["messages"])]}


def after(state: MessagesState) -> str:
    return "tools" if state["messages"][-1].tool_calls else END


graph = StateGraph(MessagesState)
graph.add_node("call", call)
graph.add_node("tools", ToolNode([get_weather]))
graph.add_edge(START, "call")
graph.add_conditional_edges("call", after)
graph.add_edge("tools", "call")
app = graph.compile(checkpointer=InMemorySaver())

# a tool, its result, an answer
thread = {"configurable": {"thread_id": "1"}}
state = app.invoke({"messages": [("user", ASK)]}, thread)
kinds = [type(message) for message in state["messages"][1:]]
assert kinds == [AIMessage, ToolMessage, AIMessage], kinds
assert "21 degrees" in state["messages"][2].content

# memory, and a stream of tokens
pieces = [chunk.content for chunk, _ in app.stream({"messages": [("user", "Why?")]}, thread, stream_mode="messages")]
assert "".join(pieces) == app.get_state(thread).values["messages"][-1].content

# errors
try:
    ChatOpenAI(**options, model="nope").invoke(ASK)
except openai.NotFoundError as error:
    assert "nope" in str(error)
else:
    raise AssertionError("nope")
