"""Phase 3: requests are checked, answered and judged."""
