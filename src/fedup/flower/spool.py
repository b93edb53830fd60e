"""Answers of a collection as they come, on disk: a server that is killed in the middle asks only for the rest."""

import shutil
from pathlib import Path

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError
from fedup.flower.wire import Answer

_KIND = "answer"


class Spool:
    """One folder for each question, one file for each node; without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._open: Path | None = None

    @property
    def keeps(self) -> bool:
        """Whether answers go to disk."""
        return self._open is not None

    def open(self, question: str) -> list[int]:
        """Begin with a question; the nodes whose answers to this very one are here already."""
        if self._folder is None:
            return []
        self._open = self._folder / question[:32]
        return [int(path.stem) for path in self._open.glob("*.safetensors") if path.stem.isdecimal()]

    def get(self, node: int) -> Answer | None:
        """An answer that is here; None for one that is not, or is damaged: it is asked for again."""
        if self._open is None:
            return None
        try:
            arrays, header = load_tensors(self._path(node), kind=_KIND)
            return Answer("ok", header["base"], header["details"], arrays, size=header["size"])
        except (ArtifactError, KeyError):
            self._path(node).unlink(missing_ok=True)
            return None

    def put(self, node: int, answer: Answer) -> None:
        """Keep an answer, unless it is here."""
        if self._open is not None and not self._path(node).exists():
            header = {"base": answer.base, "details": dict(answer.details), "size": answer.size}
            save_tensors(self._path(node), answer.arrays, kind=_KIND, header=header)

    def clear(self) -> None:
        """The collection is complete: answers are in the store now, and nowhere else."""
        if self._open is not None:
            shutil.rmtree(self._open, ignore_errors=True)
            self._open = None

    def _path(self, node: int) -> Path:
        assert self._open is not None
        return self._open / f"{node}.safetensors"
