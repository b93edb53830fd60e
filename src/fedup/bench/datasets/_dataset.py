from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows to spread over clients, and an official test set kept apart."""

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)
