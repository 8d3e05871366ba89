"""Task sources (``tasks``, ``arithmetic``, ``gym``, ``rows``) and episodes (``dialogue``)."""
