"""Structured output: converts a request's constraints to a grammar for the workers."""
