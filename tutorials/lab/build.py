"""Builds the lab into the folder of a site: `lab.html` and a folder `lab`.

    python -m tutorials.lab.build build/site

Needs npm, and its packages (package-lock.json), which it installs beside this file. The built files
need no network, but a web server: `python -m http.server -b 127.0.0.1 -d build/site 8001`.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tutorials.assignments.task import load_task
from tutorials.lab.session import FREE
from tutorials.lab.sheets import SHEETS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "nanovllm" / "topics" / "server" / "page"
PACKAGES = HERE / "node_modules"
ASSIGNMENTS = ("a1", "a2", "a3", "a4", "a5", "a6", "a8")  # those that need no more than a simulator
# what a file in the lab may import; what of it needs torch says so
PYTHON = ("nanovllm", "tutorials/simulation", "tutorials/assignments", "tutorials/baselines")
PYTHON_TOO = ("tutorials/*.py", "tutorials/lab/*.py")
ABOUT = (
    "Change the class, and run it beside the baseline. The public tests say whether it is right, the "
    "points how good it is on the public seeds."
)
ABOUT_FREE = "The file says what is served: SERVER, load(seed), and MyScheduler."


class CannotBuild(Exception):
    """A sentence: what is missing."""


def build_lab(out: Path) -> None:
    """Writes the lab into this folder. Raises CannotBuild."""
    install()
    target = out / "lab"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    bundle(target)
    wasm = (PACKAGES / "pyodide" / "pyodide.asm.wasm").read_bytes()
    (target / "pyodide.wasm.gzip").write_bytes(gzip.compress(wasm, mtime=0))  # the page unpacks it
    shutil.copyfile(PACKAGES / "pyodide" / "python_stdlib.zip", target / "python_stdlib.zip")
    lock = json.loads((PACKAGES / "pyodide" / "pyodide-lock.json").read_bytes())
    none = {"info": lock["info"], "packages": {}}  # no package is loaded
    (target / "pyodide-lock.json").write_text(json.dumps(none), encoding="utf-8")
    for file in (HERE / "lab.css", HERE / "scheme.js", PAGE / "player.js", PAGE / "player.css"):
        shutil.copyfile(file, target / file.name)
    zip_python(target / "python.zip")
    (target / "licenses.txt").write_text("\n\n".join(licenses()), encoding="utf-8")
    (out / "lab.html").write_text(html(), encoding="utf-8")


# --- the page ---


def html() -> str:
    data = json.dumps({"sheets": [*sheets()]}).replace("<", "\\u003c")  # it ends no script
    return (HERE / "lab.html").read_text(encoding="utf-8").replace("DATA", data)


def sheets() -> Iterator[dict[str, Any]]:
    """What the page lets choose."""
    for name, sheet in SHEETS.items():
        described = sheet.described()
        yield {"name": name, "group": "sliders", "label": described["title"]} | described
    for name in ASSIGNMENTS:
        task = load_task(name)
        starter = ROOT / "tutorials" / "assignments" / name / "starter.py"
        yield {
            "name": name,
            "group": "assignments",
            "label": f"{name}: {task.title}",
            "title": task.title,
            "text": ABOUT,
            "handout": f"tutorials/assignments/{name}/index.html",  # a page of the book
            "goals": [f"{goal_name}: {goal.wanted}" for goal_name, goal in task.goals.items()],
            "starter": starter.read_text(encoding="utf-8"),
            "parts": [part.name for part in task.parts],
            "is_assignment": True,
        }
    yield {
        "name": FREE,
        "group": "free",
        "label": "Free sheet: your load, your server",
        "title": "Free sheet",
        "text": ABOUT_FREE,
        "starter": (HERE / "free.py").read_text(encoding="utf-8"),
        "parts": ["free sheet"],
        "is_assignment": False,
    }


# --- what npm brings ---


def install() -> None:
    """Installs the packages, unless they are there. Runs none of their scripts."""
    lock, done = HERE / "package-lock.json", PACKAGES / "installed.json"
    if done.is_file() and done.read_bytes() == lock.read_bytes():
        return
    npm = shutil.which("npm")
    if npm is None:
        raise CannotBuild("the lab needs npm, which comes with Node.js: https://nodejs.org")
    (ROOT / "build").mkdir(exist_ok=True)
    # elsewhere, and then moved: two may build at the same time
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        for name in ("package.json", lock.name):
            shutil.copy(HERE / name, folder)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"]
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if finished.returncode:
            raise CannotBuild(f"npm ci has failed: {finished.stderr.strip()[-500:]}")
        new = Path(folder, PACKAGES.name)
        shutil.copy(lock, new / done.name)
        shutil.rmtree(PACKAGES, ignore_errors=True)
        try:
            new.rename(PACKAGES)
        except OSError:
            if not done.is_file():  # not put there by the other one
                raise


def bundle(target: Path) -> None:
    """The page's script and the worker's, each as one file."""
    node = shutil.which("node")
    if node is None:
        raise CannotBuild("the lab needs Node.js: https://nodejs.org")
    options = "--bundle --minify --format=esm --target=es2022 --external:node:* --external:ws"
    command = [node, str(PACKAGES / "esbuild" / "bin" / "esbuild"), "lab.js", "worker.js"]
    command += [*options.split(), "--log-level=warning", "--legal-comments=none"]
    command += [f"--outdir={target.resolve()}"]
    finished = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    if finished.returncode:
        raise CannotBuild(f"esbuild has failed: {finished.stderr.strip()[-2000:]}")


def licenses() -> Iterator[str]:
    """Of what is in the built files."""
    for file in sorted(PACKAGES.glob("**/package.json")):
        about = json.loads(file.read_bytes())
        if "version" not in about or "esbuild" in about["name"]:
            continue
        texts = [one.read_text(encoding="utf-8") for one in sorted(file.parent.glob("LICENSE*"))]
        yield f"{about['name']} {about['version']}: {about.get('license')}\n{''.join(texts[:1])}"
    yield "python_stdlib.zip is a part of Python: Python Software Foundation License\n"


# --- Python ---


def python_files() -> list[Path]:
    folders = [ROOT / name for name in PYTHON]
    found = {path for folder in folders for path in folder.rglob("*.py")}
    found |= {path for pattern in PYTHON_TOO for path in ROOT.glob(pattern)}
    # what the simulator and the assignments read
    found |= {path for path in ROOT.glob("nanovllm/topics/simulator/*.json")}
    return sorted(found)


def zip_python(file: Path) -> None:
    """The same bytes each time."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in python_files():
            info = zipfile.ZipInfo(path.relative_to(ROOT).as_posix())
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, path.read_bytes())


# --- the command ---


def sizes(out: Path) -> Iterator[str]:
    for path in [out / "lab.html", *sorted((out / "lab").iterdir())]:
        yield f"{path.stat().st_size:12,} bytes  {path.relative_to(out).as_posix()}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Builds the lab into the folder of a site.")
    parser.add_argument("out", type=Path, help="for example build/site")
    out = parser.parse_args(argv).out
    try:
        build_lab(out)
    except CannotBuild as error:
        raise SystemExit(str(error)) from None
    print("\n".join(sizes(out)))


if __name__ == "__main__":
    main()
