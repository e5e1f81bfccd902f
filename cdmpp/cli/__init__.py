"""The ``cdmpp`` command; what it does can be done from Python, too."""

from cdmpp.cli.main import main

__all__ = ["main"]
