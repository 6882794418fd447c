"""The command `plan`: pricing, report, pictures and search; and the measurements of `doctor --measure`."""

import sys

from tpshard.door import CallableRoom

sys.modules[__name__].__class__ = CallableRoom  # `tpshard.plan(recipe)`
