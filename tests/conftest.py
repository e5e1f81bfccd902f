"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# no test may fail because the machine was busy
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
