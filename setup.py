"""The packages: `tpshard` itself in package/; every room, another top-level folder with a py.typed; and the folders
below a room that hold files."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
ROOMS = sorted({mark.parent.name for mark in ROOT.glob("*/py.typed")} - {"package"})
FILES = [file for room in ROOMS for file in (ROOT / room).rglob("*.*") if file.parent.name != "__pycache__"]
PACKAGES = sorted({"tpshard"} | {f"tpshard.{'.'.join(file.parent.relative_to(ROOT).parts)}" for file in FILES})
DATA = [f"*.{kind}" for kind in ("yaml", "json", "html", "jinja", "css", "js", "svg", "txt", "typed")]

setup(
    packages=PACKAGES,
    package_dir={"tpshard": "package"} | {f"tpshard.{room}": room for room in ROOMS},
    package_data=dict.fromkeys(PACKAGES, DATA),
)
