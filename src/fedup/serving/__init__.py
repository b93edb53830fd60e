"""Phase 4: a model that is served through a filter, and files of models."""
