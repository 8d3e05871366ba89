"""``python -m ostinato`` and the ``ostinato`` command."""

from __future__ import annotations

from ostinato.cli.app import main

if __name__ == "__main__":
    main()
