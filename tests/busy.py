"""Runs a command while other processes keep cores busy: python tests/busy.py 2 make test"""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import Process


def spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    spinning = [Process(target=spin, daemon=True) for _ in range(int(sys.argv[1]))]
    for process in spinning:
        process.start()
    try:
        sys.exit(subprocess.call(sys.argv[2:]))
    finally:
        for process in spinning:
            process.kill()
