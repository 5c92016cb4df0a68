"""What a singleton shows over HTTP."""
