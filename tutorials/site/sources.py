"""Code as HTML: the blocks of a chapter with their recorded output, and a module's source with its lines."""

import ast
import re
from html import escape
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

from tutorials.site.links import ROOT, is_source, lines_of_names

PLAIN = HtmlFormatter(nowrap=True)
UNCOLORED = re.compile(r'<span class="(?:n|na|o|p|w|err|nn|x)">([^<]*)</span>')
LABELS = {"varies": "prints, for example", "": "prints"}


def colored(code: str, lexer) -> str:
    """Without the spans of names, signs and spaces, which have no colour: they are most of a page."""
    return UNCOLORED.sub(r"\1", highlight(code, lexer, PLAIN))


def block(language: str, note: str, code: str, is_output: bool) -> str:
    """A block of a page. What runs has a button to copy it; output says so."""
    if is_output:
        label = LABELS[note]
        return f'<pre class="output" data-label="{label}" tabindex="0"><code>{escape(code, False)}</code></pre>\n'
    runs = "runs" if language in ("python", "bash") else "quote"
    lexer = get_lexer_by_name("python" if language == "py" else language or "text", stripnl=False)
    inside = colored(code, lexer)
    return f'<pre class="code {runs}" tabindex="0"><code>{inside}</code></pre>\n'


def lexer_for(path: Path):
    try:
        return get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        return get_lexer_by_name("bash", stripnl=False)


def source_page(path: Path) -> str:
    """The page of a module: each line has a number, each name an anchor."""
    source = (ROOT / path).read_text(encoding="utf-8")
    names = {line: name for name, line in lines_of_names(ROOT / path).items()}
    lines = colored(source, lexer_for(path)).splitlines()
    width = len(str(len(lines)))
    shown = []
    for number, line in enumerate(lines, 1):
        anchor = f'<a id="{names[number]}"></a>' if number in names else ""
        shown.append(f'{anchor}<i id="L{number}">{number:{width}}</i> {line}')
    text = "\n".join(shown)
    return f'# {path.as_posix()}\n\n<pre class="code source" tabindex="0"><code>{text}\n</code></pre>\n'


def first_line(path: Path) -> str:
    """Of the docstring of a module, or of a package."""
    file = path / "__init__.py" if path.is_dir() else path
    if file.suffix != ".py" or not file.exists():
        return ""
    doc = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    return " ".join(doc.partition("\n\n")[0].split())


def has_sources(folder: Path) -> bool:
    return any(is_source(entry) for entry in folder.iterdir() if entry.is_file())


def entries(path: Path) -> list[Path]:
    """The modules and folders in a folder, folders first."""
    found = sorted((ROOT / path).iterdir(), key=lambda entry: (entry.is_file(), entry.name))
    return [
        entry.relative_to(ROOT)
        for entry in found
        if (has_sources(entry) if entry.is_dir() else is_source(entry) and entry.stat().st_size)
    ]
