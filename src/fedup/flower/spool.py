"""Answers of a collection as they come, on disk: a server that is killed in the middle asks only for the rest."""

import hashlib
import json
import shutil
from pathlib import Path

from fedup.artifacts import load_tensors, save_tensors
from fedup.errors import ArtifactError
from fedup.flower.wire import NONCE, Answer, Ask

_KIND = "answer"


class Spool:
    """One folder for each model, one file for each node and question; without a folder nothing is kept."""

    def __init__(self, folder: str | Path | None, base: str) -> None:
        self._folder = None if folder is None else Path(folder) / base[:32]

    def get(self, node: int, ask: Ask) -> Answer | None:
        """An answer that is here; None for one that is not, or is damaged: it is asked for again."""
        if self._folder is None or not self._path(self._folder, node, ask).exists():
            return None
        try:
            arrays, header = load_tensors(self._path(self._folder, node, ask), kind=_KIND)
            return Answer("ok", header["base"], header["details"], arrays, size=header["size"])
        except (ArtifactError, KeyError):
            return None

    def put(self, node: int, ask: Ask, answer: Answer) -> bool:
        """Keep an answer; whether it is kept. One without a single number cannot be, and needs no room."""
        if self._folder is None or not all(tensor.numel() for tensor in answer.arrays.values()):
            return False
        header = {"base": answer.base, "details": dict(answer.details), "size": answer.size}
        save_tensors(self._path(self._folder, node, ask), answer.arrays, kind=_KIND, header=header)
        return True

    def clear(self) -> None:
        """The collection is complete: answers are in the store now, and nowhere else."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    def _path(folder: Path, node: int, ask: Ask) -> Path:
        question = hashlib.sha256(
            json.dumps({key: value for key, value in ask.details.items() if key != NONCE}, sort_keys=True).encode()
        ).hexdigest()
        return folder / f"{node}-{question[:32]}.safetensors"
