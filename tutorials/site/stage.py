"""Stages the book: a folder of Markdown, pictures and a `mkdocs.yml`, from which a generator makes the pages.

The folder has the shape of the repository, so a link to a file leads to its page at the same place. A page is staged
because it is part of the book, or because another one links to it.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from tutorials.lab.build import ASSIGNMENTS
from tutorials.site.api import api_page
from tutorials.site.links import ROOT, is_source, page_of
from tutorials.site.pages import Page, minutes
from tutorials.site.search import write_index
from tutorials.site.sources import entries, first_line, source_page

HERE = Path(__file__).parent
PLAYER = ROOT / "nanovllm" / "topics" / "server" / "page"
BOOK = ("tutorials/*.md", "tutorials/assignments/README.md", "tutorials/assignments/a?/README.md")
LAB = '<a class="button" href="lab.html">Open the lab</a>'
IN_LAB = '<p><a class="button" href="../../../lab.html#{}">Open it in the lab</a></p>'
NO_LAB = "The lab is not part of this copy: it needs npm when the site is built."


def chapters() -> list[Path]:
    return [path.relative_to(ROOT) for path in sorted((ROOT / "tutorials").glob("[0-9]*.md"))]


def list_of_chapters() -> str:
    """For the first page: each with its minutes; the browser marks those that are read."""
    rows = []
    for path in chapters():
        text = (ROOT / path).read_text(encoding="utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        said = f'<span class="soft" data-read="{path.stem[:2]}">{minutes(text)} minutes</span>'
        rows.append(f"- [{title}]({path.as_posix()}) {said}\n")
    return "".join(rows)


def first_page(has_lab: bool) -> Page:
    text = (HERE / "index.md").read_text(encoding="utf-8")
    text = text.replace("<!-- chapters -->\n", list_of_chapters())
    return Page(Path("index.md"), text.replace("<!-- lab -->", LAB if has_lab else NO_LAB))


def with_button(text: str, path: Path, has_lab: bool) -> str:
    """A handout has one below its title, if its assignment is in the lab."""
    name = path.parent.name
    is_handout = path == Path("tutorials/assignments", name, "README.md") and name in ASSIGNMENTS
    if not (has_lab and is_handout):
        return text
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{IN_LAB.format(name)}\n{rest}"


def folder_page(path: Path) -> Page:
    """What a folder has, with the first sentence of each module."""
    rows = [
        f"# {path.as_posix()}/\n\n{first_line(ROOT / path)}\n\n| Module | What it does |\n|---|---|\n"
    ]
    for entry in entries(path):
        name = f"{entry.name}/" if (ROOT / entry).is_dir() else entry.name
        target = entry.relative_to(path).as_posix()
        rows.append(f"| [`{name}`]({target}) | {first_line(ROOT / entry)} |\n")
    return Page(path, "".join(rows))


def page_for(path: Path) -> Page | None:
    """The page that shows a file or folder; None for what is copied as it is."""
    file = ROOT / path
    if file.is_dir():
        readme = path / "README.md"
        return page_for(readme) if (ROOT / readme).exists() else folder_page(path)
    if path.suffix == ".md":
        return Page(path, file.read_text(encoding="utf-8"))
    return Page(path, "") if is_source(path) else None


def modules() -> Iterator[Path]:
    """All modules of the engine, and the folders that they are in."""
    for path in sorted((ROOT / "nanovllm").rglob("*.py")):
        yield path.relative_to(ROOT)
        yield path.parent.relative_to(ROOT)


def stage(folder: Path, has_lab: bool = False) -> None:
    """Writes the pages and what belongs to them below `folder`."""
    pages = folder / "pages"
    texts = [first_page(has_lab), Page(Path("api.md"), api_page())]
    staged = {page.path for page in texts}
    for page in texts:
        write_page(pages, page, page.staged())
    wanted = {path.relative_to(ROOT) for pattern in BOOK for path in ROOT.glob(pattern)}
    wanted.update(modules(), *(page.links.wanted for page in texts))
    while wanted := {path for path in wanted if page_of(path) not in staged}:
        found: set[Path] = set()
        for path in sorted(wanted):
            if page_of(path) in staged:
                continue
            staged.add(page_of(path))
            page = page_for(path)
            if page is None:
                copy(pages, path)
            elif page.path.suffix != ".md" and (ROOT / page.path).is_file():
                write_page(pages, page, source_page(page.path))
            else:
                write_page(pages, page, with_button(page.staged(), page.path, has_lab))
                found |= page.links.wanted
                texts.append(page)
        wanted = found
    copy_files(folder, has_lab)
    write_index(texts, pages / "static" / "search_index.js")


def write_page(pages: Path, page: Page, text: str) -> None:
    file = pages / page_of(page.path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def copy(pages: Path, path: Path) -> None:
    file = pages / path
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, file)


def copy_files(folder: Path, has_lab: bool) -> None:
    """What is no page: the generator's settings, the frame of a page, scripts and styles."""
    settings = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
    settings = settings.replace("lab: false", f"lab: {str(has_lab).lower()}")
    (folder / "mkdocs.yml").write_text(settings, encoding="utf-8")
    shutil.copytree(HERE / "theme", folder / "theme")
    static = folder / "pages" / "static"
    shutil.copytree(HERE / "static", static)
    for name in ("player.js", "player.css"):
        shutil.copy(PLAYER / name, static)
