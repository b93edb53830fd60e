"""Phase 1: a federation learns."""
