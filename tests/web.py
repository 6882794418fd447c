"""HTTP as the tests of the server speak it: a connection a request, and no answer is too late."""

from __future__ import annotations

import httpx
from patience import PATIENCE

web = httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0))
