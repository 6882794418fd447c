"""An HTTP client for the server's tests: one connection per request, with the suite's time limit."""

from __future__ import annotations

import httpx
from patience import PATIENCE

web = httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0))
