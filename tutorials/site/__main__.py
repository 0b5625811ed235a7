"""Builds the book as static pages, which need no server and no network when they are read.

    pip install -e '.[site]'
    python -m tutorials.site [--out FOLDER]

Writes to build/site. Open index.html there. The lab is built, too, if npm is there, and needs a web server.
"""

import argparse
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tutorials.lab.build import CannotBuild, build_lab
from tutorials.site.links import ROOT
from tutorials.site.stage import stage

GENERATOR = "properdocs"  # or mkdocs 1.6: both read the same file


def generate(folder: Path, out: Path) -> None:
    """Makes HTML of what is staged. A broken link is an error."""
    if find_spec(GENERATOR) is None:
        raise SystemExit(f"{GENERATOR} is not installed: pip install -e '.[site]'")
    command = [sys.executable, "-m", GENERATOR, "build", "--strict", "--quiet"]
    settings = ["--config-file", str(folder / "mkdocs.yml"), "--site-dir", str(out)]
    if subprocess.run([*command, *settings]).returncode:
        raise SystemExit(f"{GENERATOR} has failed; its messages are above")


def has_built_lab(folder: Path) -> bool:
    """The lab, if it can be built here. It is built first, because the pages link to it if it is there."""
    try:
        build_lab(folder)
    except CannotBuild as error:
        print(f"without the lab: {error}")
        return False
    return True


def refuse_others_folder(out: Path) -> None:
    """The generator empties the folder."""
    is_empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not is_empty and not (out / "static" / "site.js").exists():
        raise SystemExit(f"{out} has files that are not of the site: name a new folder")


def build(out: Path) -> None:
    refuse_others_folder(out)
    begin = time.perf_counter()
    with TemporaryDirectory() as folder:
        lab = Path(folder) / "lab"
        lab.mkdir()
        has_lab = has_built_lab(lab)
        if has_lab:
            print_size("the lab", lab, begin)
        begin = time.perf_counter()
        stage(Path(folder), has_lab)
        generate(Path(folder), out.absolute())
        for name in ("sitemap.xml", "sitemap.xml.gz"):  # of addresses that are not known
            (out / name).unlink(missing_ok=True)
        print_size(f"{len([*out.rglob('*.html')])} pages", out, begin)
        shutil.copytree(lab, out, dirs_exist_ok=True)
    print(out / "index.html")
    if has_lab:
        server = f"python -m http.server -b 127.0.0.1 -d {out} 8001"
        print(f"the lab is at http://127.0.0.1:8001/lab.html after: {server}")


def print_size(name: str, folder: Path, begin: float) -> None:
    """In megabytes."""
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{name}: {num_bytes / 1e6:.1f} MB, {time.perf_counter() - begin:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", metavar="FOLDER")
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
