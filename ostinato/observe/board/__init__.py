"""`ostinato board RUN`: a page in the browser that follows a run while it goes.

    run folder -> tail (new rows) -> follow (state), samples -> server -> page

Reads run folders, as the report does, and shares its charts, timeline, samples and style. Nothing is fetched
from anywhere else.
"""

from __future__ import annotations

from ostinato.observe.board.server import Server, is_loopback, open_server

__all__ = ["Server", "is_loopback", "open_server"]
