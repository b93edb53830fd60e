"""Phase 2: what clients send, and the store of it at the server."""
