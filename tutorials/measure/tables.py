"""Writes the tables of README, the appendix and the handouts from the files in tutorials/results.

    python -m tutorials.measure.tables

A table stands between <!-- table NAME FILE... --> and <!-- end of table -->. A test compares it
with the files.
"""

import ast
import json
import os
import re
from pathlib import Path

from tutorials.assignments.seeds import handout_table
from tutorials.machine import ROOT
from tutorials.report import markdown, rounds_text, spread

RESULTS = ROOT / "tutorials" / "results"
PAGES = [
    ROOT / "README.md",
    ROOT / "tutorials" / "appendix.md",
    *sorted((ROOT / "tutorials" / "assignments").glob("*/README.md")),
]
MARK = re.compile(
    r"(<!-- table (?P<name>\w+)(?P<files>[^>]*) -->\n)(?P<table>.*?)(<!-- end of table -->)",
    re.DOTALL,
)
ENGINES = {
    "nanovllm-torch": "nanovllm as installed above",
    "nanovllm": "nanovllm with the extra `cpu`",
    "vllm": "vLLM {}",
    "nanovllm-original": "nano-vllm {}",
    "hf": "transformers {}, `generate` on one padded batch",
    "hf-cb": "transformers {}, continuous batching",
}
MODELS = {"tiny_qwen3": "embedded model", "qwen3-0.6b-random": "Qwen3-0.6B"}


def speed(reports: list[dict], links: list[str]) -> str:
    """For README: what was run, and a line for each engine, the fastest on the last model
    above."""
    names = [MODELS.get(report["model"], report["model"]) for report in reports]
    lines = []
    for name, report, link in zip(names, reports, links):
        low, high = report["tokens"]
        work = f"{report['requests']} requests of {low} to {high} tokens in and out, {report['device']}"
        lines.append(
            f"- {name} in {report['dtype']}: {work}, {rounds_text(report)} ([all numbers]({link}))"
        )
    header = [""]
    for name in names:
        header += [f"{name}: tokens/s", "nanovllm[cpu] against this row", "ready after"]
    rows = [header]
    last = reports[-1]["engines"]
    for engine in sorted(last, key=lambda name: -last[name].get("output_tokens_per_second", 0)):
        cells = [ENGINES[engine].format(last[engine].get("version", ""))]
        for report in reports:
            cells += speed_cells(report["engines"].get(engine, {"error": "not run"}))
        rows.append(cells)
    return "\n".join([*lines, "", markdown(rows)])


def speed_cells(engine: dict) -> list[str]:
    """Output tokens per second, how many times as fast ours is, and seconds until it can answer.
    In brackets the least and the most of all rounds."""
    if "error" in engine:
        return [engine["error"], "-", "-"]
    speeds = spread(engine, "output_tokens_per_second", ",.0f", " to ")
    ratio = ""
    if "times_as_fast" in engine:
        ratios = spread(engine, "times_as_fast", ".2f", " to ")
        ratio = f"{engine['times_as_fast']:.2f} x as fast ({ratios})"
    speed = f"{engine['output_tokens_per_second']:,.0f} ({speeds})"
    return [speed, ratio, f"{engine['startup_seconds']:,.0f} s"]


# --- of no file: from the package itself ---


def topics(page: Path) -> str:
    """The folders beside the core: the first sentences of their docstrings, and their chapters."""
    rows = [["Folder", "Topic", "Chapter"]]
    package = ROOT / "nanovllm"
    topics = sorted((package / "topics").glob("*/__init__.py"))
    for file in [package / "processing/__init__.py", package / "device/__init__.py", *topics]:
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
        chapters = []
        for name in re.findall(r"\d\d_\w+", text):
            link = os.path.relpath(ROOT / "tutorials" / f"{name}.md", page.parent)
            chapters.append(f"[{name[:2]}]({link})")
        folder = file.parent.relative_to(package).as_posix()
        rows.append([f"`{folder}/`", first_sentence(text), ", ".join(chapters)])
    return markdown(rows)


def core(page: Path) -> str:
    """The modules of the core, with the first sentences of their docstrings."""
    rows = [["Module", "What it is about"]]
    for folder in ("", "layers/", "models/"):
        for file in sorted((ROOT / "nanovllm" / folder).glob("*.py")):
            sentence = ast.get_docstring(ast.parse(file.read_bytes()))
            if sentence and not file.name.startswith("__"):
                rows.append([f"`{folder}{file.name}`", first_sentence(sentence)])
    return markdown(rows)


def first_sentence(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def tried(reports: list[dict], links: list[str]) -> str:
    """For a handout: the policies that its author has tried."""
    return handout_table(reports[0])


OF_FILES = {"speed": speed, "tried": tried}
OF_THE_PACKAGE = {"topics": topics, "core": core}


def written(text: str, page: Path) -> str:
    """The text of a page with its tables as the files have them now."""

    def table(mark: re.Match) -> str:
        name = mark["name"]
        paths = [RESULTS / f"{file}.json" for file in mark["files"].split()]
        links = [os.path.relpath(path, page.parent) for path in paths]
        reports = [json.loads(path.read_bytes()) for path in paths]
        if name in OF_THE_PACKAGE:
            found = OF_THE_PACKAGE[name](page)
        else:
            found = OF_FILES[name](reports, links)
        return f"{mark[1]}{found}\n{mark[5]}"

    return MARK.sub(table, text)


def main() -> None:
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = written(before, page)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print("rewritten:", page.relative_to(ROOT))


if __name__ == "__main__":
    main()
