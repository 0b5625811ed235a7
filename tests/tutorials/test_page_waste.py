"""What pages waste: the table against a picture of the memory in which every KiB is looked at.

Run: pytest tests/tutorials/test_page_waste.py [-k picture]
"""

import json
import random
import sys

import pytest

from tutorials.baselines import replay
from tutorials.measure import pages

KIB = 2**10
MEMORY = 240 * 2**20
LAYOUTS = pages.all_layouts()
NOTHING, PADDING, EMPTY, TOKENS = range(4)


def small_load() -> replay.Lengths:
    rng = random.Random(0)
    return [(rng.randint(20, 400), rng.randint(10, 40)) for _ in range(30)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(pages, "MEMORY", MEMORY)
    monkeypatch.setattr(pages, "EVERY", 4)


def test_layouts():
    """Tokens of a block, pieces, and KiB of a piece: a token takes 112 KiB, 4 in a layer."""
    expected = {
        "software": (16, 1, 16 * 112),
        "4 KiB, all layers": (1, 1, 112),
        "64 KiB, all layers": (1, 1, 128),
        "256 KiB, all layers": (2, 1, 256),
        "2 MiB, all layers": (16, 1, 2048),
        "64 KiB, all layers, unpadded": (4, 1, 7 * 64),
        "2 MiB, all layers, unpadded": (128, 1, 7 * 2048),
        "4 KiB, a page for each layer": (1, 28, 4),
        "2 MiB, a page for each layer": (512, 28, 2048),
        "4 KiB, keys and values apart": (2, 56, 4),
        "2 MiB, keys and values apart": (1024, 56, 2048),
    }
    for name, numbers in expected.items():
        block_size, num_pieces, block_bytes, _ = LAYOUTS[name]
        assert (block_size, num_pieces, block_bytes / num_pieces / KIB) == numbers, name
    for name, layout in LAYOUTS.items():
        page = pages.PAGES.get(name.partition(",")[0], 0)
        assert layout.block_bytes == layout.num_pieces * layout.pages_per_piece * page or not page
        is_padded = name.endswith(", all layers") and not name.startswith("4 KiB")
        assert layout.packed == (7 / 8 if is_padded else 1), name


def test_parts_add_up():
    results = pages.measure(small_load(), LAYOUTS)
    for name, result in results.items():
        parts = [result[part] for part in ("tokens", "padding", "empty")]
        assert sum(parts) == pytest.approx(1) and min(parts) >= 0, name
        assert 0 < result["used_blocks"] <= result["num_blocks"], name
    assert results["4 KiB, all layers"]["empty"] == pytest.approx(0)  # blocks of one token
    lines = pages.shown(results).splitlines()
    assert len(lines) == 1 + len(LAYOUTS) and lines[1].split()[1] == "16"


def test_the_whole_command(monkeypatch, tmp_path, capsys):
    trace, file = tmp_path / "trace.csv", tmp_path / "pages.json"
    rows = [f"2023-11-16 18:15:46.6805900,{n_in},{n_out}" for n_in, n_out in small_load()]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    options = ["--trace", str(trace), "--requests", "30", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["pages", *options])
    monkeypatch.setattr(pages, "MEMORY", 100 * MEMORY)
    with pytest.raises(SystemExit):
        pages.main()
    assert "30 requests are too few" in capsys.readouterr().err
    few = {name: LAYOUTS[name] for name in ("software", "2 MiB, all layers")}
    monkeypatch.setattr(pages, "all_layouts", lambda: few)
    monkeypatch.setattr(pages, "MEMORY", MEMORY)
    pages.main()
    report = json.loads(file.read_bytes())
    assert report["pages"]["Azure, lengths recorded"]["layouts"].keys() == few.keys()
    assert "ShareGPT, lengths drawn: 30 requests" in capsys.readouterr().out
