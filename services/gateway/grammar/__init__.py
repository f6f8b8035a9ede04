"""Structured output: what a request asks for, as a grammar that workers follow."""
