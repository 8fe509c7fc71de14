"""For all tests."""

from __future__ import annotations

from hypothesis.internal.conjecture import providers

# hypothesis also draws constants that it finds in whichever of our modules are imported: what a test tries would depend
# on the tests that ran before it in the same process. (HUNT=20000 tries other things.)
_none = providers._local_constants
providers._get_local_constants = lambda: _none
