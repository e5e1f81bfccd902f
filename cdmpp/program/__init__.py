"""Tensor programs: networks, their tasks, the spaces of their schedules, compact ASTs, and the code they compile to.

What is public is named in :mod:`cdmpp` and imported from the modules here; importing this package loads none of them.
"""
