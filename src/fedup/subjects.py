"""Tags of persons: an id is hashed with a secret key before it is stored or sent."""

import hashlib
import hmac
import os
import secrets
import stat
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from fedup.errors import ArtifactError, RequestError, StorageError
from fedup.files import explained

KEY_BYTES = 32
SHORT_TAG = 12  # hex digits by which people name a person
_PREFIX = b"fedup subject key 1\n"


@dataclass(frozen=True)
class SubjectKey:
    """The secret key that turns ids of persons into tags.

    The same id and key always give the same tag. Without the key nobody can tell which id a tag is of. Whoever holds
    the key can try ids one by one, so keep it where the ids may be known.

    >>> key = SubjectKey.new()
    >>> key.tag("P-113") == key.tag("P-113") != SubjectKey.new().tag("P-113")
    True
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or len(self.secret) != KEY_BYTES:
            raise ArtifactError(f"A key of persons is {KEY_BYTES} bytes: make one with SubjectKey.new().")

    @classmethod
    def new(cls) -> Self:
        """A random key."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The key in a file that `save` wrote. As ssh does, it refuses a file of yours that others can read."""
        with explained(f"read the key of persons {path}"), Path(path).open("rb") as file:
            found, content = os.fstat(file.fileno()), file.read()
        if hasattr(os, "getuid") and found.st_uid == os.getuid() and found.st_mode & 0o077:
            raise ArtifactError(
                f"Others can read the key of persons {path} (mode {stat.S_IMODE(found.st_mode):04o}), and with it find "
                f"out who is in the data. Run chmod 600 {path}."
            )
        try:
            if not content.startswith(_PREFIX):
                raise ValueError
            return cls(bytes.fromhex(content.removeprefix(_PREFIX).decode("ascii").strip()))
        except (ValueError, ArtifactError) as error:
            raise ArtifactError(f"{path} is no key of persons: name the file that SubjectKey.save wrote.") from error

    def save(self, path: str | Path) -> None:
        """Write the key to a new file that only its owner can read (mode 0600)."""
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise StorageError(f"{path} already exists. A key is never overwritten: name another file.") from error
        except OSError as error:
            raise StorageError(f"Could not write the key of persons {path}: {error}.") from error
        with explained(f"write the key of persons {path}"), os.fdopen(handle, "wb") as file:
            file.write(_PREFIX + self.secret.hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def tag(self, subject: str) -> str:
        """HMAC-SHA256 of a person's id, in hex; spaces around the id do not count."""
        text = unicodedata.normalize("NFC", subject).strip() if isinstance(subject, str) else ""
        if not text:
            raise RequestError(f"The id of a person is a text that is not empty; found {type(subject).__name__}.")
        return hmac.new(self.secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Tells keys apart, and nothing else."""
        return hmac.new(self.secret, b"\0fingerprint", hashlib.sha256).hexdigest()[:16]
