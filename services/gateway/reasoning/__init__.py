"""Reasoning that models write before their answers."""
