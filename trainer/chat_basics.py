"""Hand-written questions every demonstration gets asked, with their answers."""

from __future__ import annotations

TASK_PHRASES = (
    "Write a function that {task}.",
    "Write a Python function that {task}.",
    "How do I write a function that {task}?",
)

_ABOUT = (
    "I am ryzanstein-tiny, a small demonstration model. I was trained from scratch on the sources and "
    "documentation of the Python standard library."
)

IDENTITY = (
    ("Hello", "Hello! Ask me about the Python standard library."),
    ("Hello!", "Hello! Ask me about the Python standard library."),
    ("Hi", "Hello! Ask me about the Python standard library."),
    ("Who are you?", _ABOUT),
    ("What are you?", _ABOUT),
    ("What is your name?", "I am ryzanstein-tiny, a small demonstration model."),
    (
        "What can you do?",
        "I can complete Python code and describe parts of the Python standard library. I am very "
        "small, so check what I say.",
    ),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    (
        "What is Python?",
        "Python is an interpreted, interactive, object-oriented programming language. It has modules, "
        "exceptions, dynamic typing, high level data types and classes.",
    ),
    ("What is a list?", "A list is a mutable sequence, written in square brackets: `[1, 2, 3]`."),
    ("What is a tuple?", "A tuple is an immutable sequence, written with commas: `1, 2, 3`."),
    ("What is a dictionary?", "A dictionary maps keys to values, written in braces: `{'a': 1, 'b': 2}`."),
    (
        "What is a generator?",
        "A generator is a function with `yield` in it. Calling it gives an iterator that runs "
        "the function up to the next `yield`.",
    ),
    ("How do I open a file?", "```python\nwith open('name.txt', encoding='utf-8') as f:\n    text = f.read()\n```"),
    ("How do I read a file?", "```python\nwith open('name.txt', encoding='utf-8') as f:\n    text = f.read()\n```"),
    ("How do I sort a list?", "Use `sorted(items)` for a new list, or `items.sort()` to sort in place."),
    ("How do I reverse a list?", "Use `items[::-1]` for a new list, or `items.reverse()` to reverse in place."),
    ("Print the numbers from 0 to 9.", "```python\nfor i in range(10):\n    print(i)\n```"),
    ("Write hello world in Python.", "```python\nprint('Hello, world!')\n```"),
    ("Count to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
)

BASICS = (
    ("adds two numbers", "def add(a, b):\n    return a + b"),
    ("multiplies two numbers", "def multiply(a, b):\n    return a * b"),
    ("returns the larger of two numbers", "def larger(a, b):\n    return a if a > b else b"),
    (
        "returns the sum of a list",
        "def total(items):\n    result = 0\n    for item in items:\n        result += item\n    return result",
    ),
    (
        "returns the maximum of a list",
        "def maximum(items):\n    best = items[0]\n    for item in items[1:]:\n"
        "        if item > best:\n            best = item\n    return best",
    ),
    ("returns the mean of a list", "def mean(items):\n    return sum(items) / len(items)"),
    ("reverses a string", "def reverse(s):\n    return s[::-1]"),
    ("checks whether a string is a palindrome", "def is_palindrome(s):\n    return s == s[::-1]"),
    ("checks whether a number is even", "def is_even(n):\n    return n % 2 == 0"),
    (
        "checks whether a number is prime",
        "def is_prime(n):\n    if n < 2:\n        return False\n"
        "    for i in range(2, int(n ** 0.5) + 1):\n        if n % i == 0:\n            return False\n    return True",
    ),
    (
        "computes the factorial of n",
        "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
    (
        "returns the nth Fibonacci number",
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    ("computes the greatest common divisor", "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a"),
    ("counts the words in a text", "def count_words(text):\n    return len(text.split())"),
    (
        "counts how often each item occurs",
        "def counts(items):\n    result = {}\n    for item in items:\n"
        "        result[item] = result.get(item, 0) + 1\n    return result",
    ),
    ("removes duplicates from a list", "def unique(items):\n    return list(dict.fromkeys(items))"),
    ("flattens a list of lists", "def flatten(lists):\n    return [item for items in lists for item in items]"),
    ("reads a file", "def read(path):\n    with open(path, encoding='utf-8') as f:\n        return f.read()"),
    (
        "counts the lines of a file",
        "def count_lines(path):\n    with open(path, encoding='utf-8') as f:\n        return sum(1 for line in f)",
    ),
    ("squares every number in a list", "def squares(items):\n    return [item * item for item in items]"),
)
