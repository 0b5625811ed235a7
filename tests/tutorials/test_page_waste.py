"""What pages waste: the table against a picture of the memory in which every KiB is looked at.

Run: pytest tests/tutorials/test_page_waste.py [-k picture]
"""

import json
import random
import sys

import pytest

from nanovllm.frontend.stats import cache_usage
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


class Picture:
    """Of the memory, KiB by KiB, at the end of each step that the replay looks at."""

    def __init__(self, layout: pages.Layout):
        self.layout = layout
        self.num_blocks = MEMORY // layout.block_bytes
        self.counts = dict.fromkeys((PADDING, EMPTY, TOKENS), 0)
        self.mappings: list[int] = []
        self.running: list[int] = []
        self.scheduler = None

    def look(self, scheduler) -> dict[str, int]:
        """In place of cache_usage: the plan is made, its tokens are not written."""
        self.scheduler = scheduler
        return cache_usage(scheduler)

    def run(self, schedule) -> None:
        """Before the model runs."""
        if self.scheduler is None:
            return
        seqs = [seq for request in self.scheduler.running for seq in request.unfinished]
        lengths = {id(seq): seq.num_computed_tokens for seq in seqs}
        for seq, _, num_tokens in schedule.items:
            lengths[id(seq)] += num_tokens
        memory = bytearray(self.num_blocks * self.layout.block_bytes // KIB)
        drawn = [self.draw(memory, seq.block_table, lengths[id(seq)]) for seq in seqs]
        for kind in self.counts:
            self.counts[kind] += memory.count(kind)
        self.mappings.append(sum(drawn))
        self.running.append(len(seqs))
        self.scheduler = None

    def draw(self, memory: bytearray, table: list[int], num_tokens: int) -> int:
        """The number of pieces."""
        block_size, num_pieces, block_bytes, _ = self.layout
        size = block_bytes // num_pieces // KIB
        of_a_token = pages.TOKEN_BYTES // num_pieces // KIB
        for i, block in enumerate(table):
            for piece in range(num_pieces):
                begin = (piece * self.num_blocks + block) * size
                assert memory[begin : begin + size] == bytes(size), "somebody else's"
                memory[begin : begin + size] = bytes([PADDING]) * size
                for slot in range(block_size):
                    kind = TOKENS if i * block_size + slot < num_tokens else EMPTY
                    at = begin + slot * size // block_size
                    memory[at : at + of_a_token] = bytes([kind]) * of_a_token
        return len(table) * num_pieces


@pytest.mark.slow(but_every=7)
@pytest.mark.parametrize(
    "name",
    [
        "software",
        "64 KiB, all layers",
        "64 KiB, all layers, unpadded",
        "256 KiB, a page for each layer",
        "2 MiB, all layers",
        "2 MiB, a page for each layer",
        "2 MiB, keys and values apart",
    ],
)
def test_the_table_is_what_a_picture_of_the_memory_shows(name, monkeypatch):
    layout = LAYOUTS[name]
    picture = Picture(layout)

    class Drawn(replay.NoModel):
        def run(self, schedule):
            picture.run(schedule)
            return super().run(schedule)

    monkeypatch.setattr(pages, "EVERY", 8)
    monkeypatch.setattr(replay, "cache_usage", picture.look)
    monkeypatch.setattr(replay, "NoModel", Drawn)
    result = pages.measure(small_load(), {name: layout})[name]
    total = sum(picture.counts.values())
    num_looks = len(picture.running)
    assert num_looks >= 5
    assert result["tokens"] == pytest.approx(picture.counts[TOKENS] / total)
    assert result["padding"] == pytest.approx(picture.counts[PADDING] / total)
    assert result["empty"] == pytest.approx(picture.counts[EMPTY] / total)
    assert result["running"] == pytest.approx(sum(picture.running) / num_looks)
    num_mappings = 0 if name == "software" else sum(picture.mappings) / num_looks
    assert result["mappings"] == pytest.approx(num_mappings)


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
