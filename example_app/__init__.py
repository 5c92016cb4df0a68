"""A small FastAPI application whose two jobs run once, however many workers serve it."""
