"""Where a page's links and names lead: to another page, to a module's source, or to a file of vLLM."""

import ast
import json
import os
import posixpath
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLLM = json.loads((ROOT / "tutorials" / "results" / "vllm_symbols.json").read_bytes())
VLLM_FILES = VLLM["files"]
VLLM_ADDRESS = f"https://github.com/vllm-project/vllm/blob/v{VLLM['version']}/vllm/"
# a link with its text, or a name in code
LINK_OR_CODE = re.compile(
    r"(?P<link>\[(?P<text>(?:[^][`]|`[^`\n]*`|!\[[^]]*\]\([^)]*\))*)\]\((?P<target>[^)\s]+)\))|`(?P<code>[^`\n]+)`"
)
PLACE = re.compile(r"`([^`]+\.py)`: (`[^`]+`(?:, `[^`]+`)*)")
CODE = re.compile(r"`([^`\n]+)`")
README = Path("README.md")  # index.md has its place


@cache
def lines_of_names(path: Path) -> dict[str, int]:
    """Functions, classes, methods, fields and constants of a source file, and their lines."""
    found: dict[str, int] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found[prefix + name] = node.lineno
                case ast.ClassDef(name=name):
                    found[prefix + name] = node.lineno
                    visit(node.body, f"{prefix}{name}.")
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found[prefix + name] = node.lineno
                case ast.Assign(targets=[ast.Name(id=name)]):
                    found[prefix + name] = node.lineno

    if path.suffix == ".py":
        visit(ast.parse(path.read_bytes()).body, "")
    return found


def is_source(path: Path) -> bool:
    """Whether a file is shown as a page: code, but neither data nor a picture."""
    return path.suffix in (".py", ".js", ".css", ".html", ".yaml", ".yml", ".toml", "")


def page_of(path: Path) -> Path:
    """The Markdown file that shows a file or folder of the repository. Data and pictures are themselves."""
    if path == README:
        return Path("repository.md")
    shown = Path(*(part.lstrip(".") for part in path.parts))  # a generator leaves out .github
    if (ROOT / path).is_dir():
        readme = path / "README.md"
        return page_of(readme) if (ROOT / readme).exists() else shown / "index.md"
    if path.suffix != ".md" and is_source(path):
        return shown.with_name(shown.name + ".md")
    return shown


def module_named(name: str, folder: Path) -> Path | None:
    """The file or folder that a name such as `scheduler.py`, `layers/` or `nanovllm/step.py` means."""
    if not re.fullmatch(r"[\w./-]+(\.py|/)", name) or name.startswith(("/", ".")):
        return None
    for place in (Path(), Path("nanovllm"), Path("tutorials"), folder):
        if (ROOT / place / name).exists():
            return place / name
    return None


def has_symbol(file: str, symbol: str) -> bool:
    """A method may stand without its class, if its name is no usual word."""
    classes = VLLM_FILES[file]
    owner, _, name = symbol.rpartition(".")
    if name in classes.get(owner, "").split() or (not owner and name in classes):
        return True
    is_method = not owner and "_" in name
    return is_method and any(name in names.split() for names in classes.values())


def vllm_file(name: str) -> str | None:
    """The file of vLLM that is meant: its path, or the end of its path if only one file ends so."""
    found = [file for file in VLLM_FILES if file == name or file.endswith(f"/{name}")]
    return name if name in VLLM_FILES else found[0] if len(found) == 1 else None


def vllm_address(name: str, files: list[str]) -> str | None:
    """Of a file, or of a symbol that one of these files has."""
    if name.endswith(".py"):
        file = vllm_file(name)
    else:
        symbol = name.removesuffix("()")
        file = next((file for file in files if has_symbol(file, symbol)), None)
    return VLLM_ADDRESS + file if file else None


class Links:
    """Rewrites the links of one page. `wanted` collects the files of the repository that they lead to."""

    def __init__(self, path: Path):
        self.path = path
        self.folder = path if (ROOT / path).is_dir() else path.parent
        self.wanted: set[Path] = set()

    def to(self, path: Path, anchor: str = "") -> str:
        """The target of a link from this page to a file of the repository."""
        self.wanted.add(path)
        return os.path.relpath(page_of(path), page_of(self.path).parent).replace(os.sep, "/") + (
            f"#{anchor}" if anchor else ""
        )

    def target(self, target: str, text: str) -> str:
        """A link to a module, whose text is a name in it, leads to this name."""
        if re.match(r"https?:|mailto:|#", target):
            return target
        file, _, anchor = target.partition("#")
        path = Path(posixpath.normpath((self.folder / file).as_posix()))
        if not (ROOT / path).exists():
            raise ValueError(f"{self.path} links to {target}, which is not there")
        if is_source(path) and not anchor:
            known = lines_of_names(ROOT / path) if (ROOT / path).is_file() else {}
            anchor = next((name for name in CODE.findall(text) if name in known), "")
        return self.to(path, anchor)

    def rewrite(self, text: str, is_of_vllm: bool = False) -> str:
        """Of prose, without blocks of code."""
        files = [file for file, _ in PLACE.findall(text) if file in VLLM_FILES]

        def replaced(match: re.Match) -> str:
            if match["link"]:
                return f"[{match['text']}]({self.target(match['target'], match['text'])})"
            name = match["code"]
            if is_of_vllm:
                target = vllm_address(name, files)
            else:
                path = module_named(name, self.folder)
                target = self.to(path) if path else None
            return f"[`{name}`]({target})" if target else match[0]

        return LINK_OR_CODE.sub(replaced, text)
