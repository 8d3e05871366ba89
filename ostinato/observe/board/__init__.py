"""`ostinato board RUN`: a page in the browser that follows a run, or a product's loop, in progress.

    run folder -> tail (new rows) -> follow (state), samples -> server -> page

Reads run folders, as the report does, and shares its charts, timeline, samples and style. Nothing is loaded
from the network.
"""

from __future__ import annotations

from ostinato.observe.board.product import JOURNAL, ProductBoard
from ostinato.observe.board.server import Board, Server, open_server

__all__ = ["JOURNAL", "Board", "ProductBoard", "Server", "open_server"]
