"""A reader of the live view's frames, as the page is one: each tells what has changed since the one before.

Tests import this file. An example that does: pytest tests/server/test_live.py
"""


class Reader:
    """What it knows of the blocks after the frames that it has read."""

    def __init__(self):
        self.tables: dict[tuple[str, int], list[int]] = {}  # of request and sequence
        self.host_tables: dict[tuple[str, int], list[int]] = {}
        self.cached: dict[int, bool] = {}

    def read(self, frame: dict) -> "Reader":
        if frame["is_whole"]:
            self.tables.clear()
            self.host_tables.clear()
        for tables, news in (
            (self.tables, frame["tables"]),
            (self.host_tables, frame["host_tables"]),
        ):
            for name, index, num_same, new in news:
                table = tables.pop((name, index), [])[:num_same] + new
                if table:
                    tables[name, index] = table
        begin, bits = frame["cached"]
        self.cached |= {begin + i: bit == "1" for i, bit in enumerate(bits)}
        self.num_blocks = frame["kv_blocks"]
        self.num_host_blocks = frame["host_blocks"]
        return self

    def blocks(self) -> list[tuple]:
        """("empty",), ("cached",), or the request that has it and how many sequences do."""
        free = [("cached",) if self.cached.get(i) else ("empty",) for i in range(self.num_blocks)]
        return with_owners(free, self.tables)

    def host_blocks(self) -> list[tuple]:
        return with_owners([("empty",)] * self.num_host_blocks, self.host_tables)


def with_owners(blocks: list[tuple], tables: dict[tuple[str, int], list[int]]) -> list[tuple]:
    for (name, _), table in tables.items():
        for i in table:
            owner, sharing = blocks[i] if len(blocks[i]) == 2 else (name, 0)
            blocks[i] = (owner, sharing + 1)
    return blocks


def blocks_of(frame: dict) -> list[tuple]:
    """Of a frame that is whole."""
    assert frame["is_whole"]
    return Reader().read(frame).blocks()


def states_of(frame: dict) -> dict[str, str]:
    """Of all requests that it tells of."""
    states = dict.fromkeys(frame["queue"], "waiting")
    for state in ("running", "preempted", "swapped", "ended"):
        states |= dict.fromkeys(frame[state], state)
    return states
