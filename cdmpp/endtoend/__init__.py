"""Whole networks: what their tasks take."""
