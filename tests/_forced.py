"""Requests for tests of mechanics: with tiny data and filters of a few steps each answer would be refused as harm."""

from functools import partial

import fedup

unlearn = partial(fedup.unlearn, force=True)
restore = partial(fedup.restore, force=True)
