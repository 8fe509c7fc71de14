"""For all tests."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis.internal.conjecture import providers

# hypothesis also draws constants that it finds in whichever of our modules are imported: what a test tries would depend
# on the tests that ran before it in the same process. (HUNT=20000 tries other things.)
_none = providers._local_constants
providers._get_local_constants = lambda: _none


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread each directory's tests over the whole run: those of e2e mostly wait, those of sim never do, and several
    are run at a time."""
    folders = [item.path.parent for item in items]
    sizes, seen = Counter(folders), Counter[object]()
    places = {}
    for item, folder in zip(items, folders, strict=True):
        places[item] = (seen[folder] + 0.5) / sizes[folder]
        seen[folder] += 1
    items.sort(key=places.__getitem__)
