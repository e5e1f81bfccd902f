"""``python -m cdmpp`` is the ``cdmpp`` command."""

import sys

from cdmpp.cli import main

if __name__ == "__main__":
    sys.exit(main())
