"""The files of a run folder, named by their content: never overwritten, checked at each use, removed when unneeded."""

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from fedup.errors import ArtifactError
from fedup.files import explained, sync_folder
from fedup.run.state import FileRecord

CHECKPOINT = "checkpoint.safetensors"
_SHOWN = 16  # hex digits of the hash in a file's name
# Names given by fedup, and by safetensors while it writes (.tmp…). Other files are not ours to remove.
_OURS = re.compile(
    rf"\w+-[0-9a-f]{{{_SHOWN}}}\.safetensors|{re.escape(CHECKPOINT)}|\.\w+\.draft|\..+\.\d+\.partial|\.tmp\w+"
)


class FileStore:
    """A folder of files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def checkpoint(self) -> Path:
        """Training that is not finished."""
        return self.folder / CHECKPOINT

    def put(self, kind: str, write: Callable[[Path], None]) -> FileRecord:
        """Write a file and name it by its content. It counts once an event names it."""
        draft = self.folder / f".{kind}.draft"
        write(draft)
        with explained(f"write a {kind} file to {self.folder}"):
            digest, size = hash_of(draft)
            record = FileRecord(f"{kind}-{digest[:_SHOWN]}.safetensors", digest, size)
            draft.replace(self.folder / record.name)
            sync_folder(self.folder)
        return record

    def path(self, record: FileRecord) -> Path:
        """The path of a file, after a check of its hash."""
        path = self.folder / record.name
        try:
            digest, size = hash_of(path)
        except FileNotFoundError as error:
            raise ArtifactError(f"{path} is missing. Take a good copy of it (sha256 {record.sha256}).") from error
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read ({error.strerror}). Take a good copy of it.") from error
        if digest != record.sha256:
            raise ArtifactError(
                f"{path} is not the file that was written: its sha256 is {digest[:12]}… ({size} bytes), and "
                f"{record.sha256[:12]}… ({record.size_bytes} bytes) was stored. Take a good copy of it."
            )
        return path

    def leftovers(self, needed: Iterable[FileRecord], *, training: bool) -> list[Path]:
        """Files that no event needs: superseded, or left by killed processes."""
        names = {record.name for record in needed} | ({CHECKPOINT} if training else set())
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return [path for path in paths if _OURS.fullmatch(path.name) and path.name not in names and path.is_file()]

    def sweep(self, needed: Iterable[FileRecord], *, training: bool) -> None:
        """Remove leftovers: a superseded store may hold what was asked to be forgotten."""
        leftovers = self.leftovers(needed, training=training)
        with explained(f"remove superseded files in {self.folder}"):
            for path in leftovers:
                path.unlink(missing_ok=True)
            if leftovers:
                sync_folder(self.folder)


def hash_of(path: Path) -> tuple[str, int]:
    """sha256 and size of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return digest, file.tell()
