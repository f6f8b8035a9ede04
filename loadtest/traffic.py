"""Texts and think times of the users. Every choice comes from the random generator of the caller."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

# All conversations of an application share its system prompt, so that caching and placement by prefix have an effect.
SYSTEM_PROMPTS = (
    "You are a helpful assistant for the Python standard library. Answer briefly, name the module and the function, "
    "and give one example. Say so when something is deprecated. Prefer pathlib to os.path, subprocess.run to os.system "
    "and a context manager wherever a resource is opened. Never invent a function that does not exist.",
    "You review Python code. Point out errors first, then style. Quote the line you speak about. Be polite and short. "
    "Do not rewrite the whole program; show only the lines that change.",
    "You explain error messages of Python to beginners, in one paragraph, without jargon, and end with one question.",
)
SYSTEM_WEIGHTS = (6, 3, 1)  # a few applications have most of the traffic

QUESTIONS = (
    "What does os.path.join do?",
    "How do I read a file line by line?",
    "Why does my loop skip every second element when I remove items?",
    "What is the difference between a list and a tuple?",
    "Write a function that reverses a string.",
    "What is the module json for?",
    "How can I measure how long a function takes?",
    "Explain: TypeError: 'NoneType' object is not iterable",
)
FOLLOW_UPS = ("Why?", "Show me an example.", "And without an import?", "Is that thread-safe?", "Shorter, please.")

CODE = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main(",
    "class Queue:\n    def __init__(self",
    "for line in open(path):\n    ",
    "async def fetch(url):\n    ",
    "with open(path) as f:\n    ",
)


@dataclass(frozen=True)
class Turn:
    """A user's next message, and the time to read and think before it."""

    text: str
    think_s: float


def choose_system_prompt(rng: random.Random) -> str:
    """Choose the system prompt of an application, by popularity."""
    return rng.choices(SYSTEM_PROMPTS, SYSTEM_WEIGHTS)[0]


def conversation(rng: random.Random, think_s: float) -> Iterator[Turn]:
    """Two to five turns; think times are log-normal around a median of `think_s`."""
    yield Turn(rng.choice(QUESTIONS), 0.0)
    for _ in range(rng.randint(1, 4)):
        yield Turn(rng.choice(FOLLOW_UPS), think_s * rng.lognormvariate(0, 0.6))


def code_prompt(rng: random.Random) -> str:
    """The beginning of a file; a random comment makes most prompts new to every cache."""
    return f"# file {rng.randrange(10_000)}\n{rng.choice(CODE)}"
