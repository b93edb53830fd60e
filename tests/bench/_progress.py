"""Progress for tests: none, or one that notes what it was told."""


def silent(what: str, done: int, total: int) -> None:
    pass


class Watch:
    """Notes what is told; may interrupt at the n-th word."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.told: list[tuple[str, int, int]] = []
        self._stop_at = stop_at

    def __call__(self, what: str, done: int, total: int) -> None:
        self.told.append((what, done, total))
        if len(self.told) == self._stop_at:
            raise KeyboardInterrupt

    @property
    def trainings(self) -> list[str]:
        """What was trained, from its first word; a training that goes on says so once more."""
        return [what for what, done, _ in self.told if done == 0]
