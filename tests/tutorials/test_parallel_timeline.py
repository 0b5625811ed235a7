"""Two ranks over time: what the two splits compute, and when each rank waits.

Run: pytest tests/tutorials/test_parallel_timeline.py
"""

import pytest
import torch
from book import needs_of

from measure.parallel_timeline import Span, fastest_step, recorded, spans_of, splits
from tutorials.parallel.two_ranks import Turn, clock, fastest, matrices, run

HIDDEN, MIDDLE = 6, 10


def test_both_splits_compute_the_same():
    up, down = matrices(HIDDEN, MIDDLE)
    x = torch.ones(HIDDEN)
    wanted = down @ torch.relu(up @ x)
    for work in splits(HIDDEN, MIDDLE).values():
        results, turns = run(work, x, num_tokens=1)
        assert len(results) == 2 and len(turns) == 1
        for result in results:
            torch.testing.assert_close(result, wanted)


def test_the_next_token_needs_the_one_before():
    results, turns = run(lambda rank, x: rank.add_up(x), torch.ones(1), num_tokens=5)
    assert [int(result) for result in results] == [32, 32]
    for i in range(2):
        assert all(len(ranks[i].waits) == 1 for ranks in turns)


@pytest.mark.parametrize("name", ["by_layers", "inside"])
def test_a_rank_waits_once_for_a_token(name):
    _, turns = run(splits(HIDDEN, MIDDLE)[name], torch.ones(HIDDEN))
    for turn in fastest(turns):
        assert len(turn.waits) == 1
        assert 0 <= turn.seconds_waited <= turn.seconds


def test_the_number_of_threads_is_as_before():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        run(lambda rank, x: x / (1 // 0), torch.ones(1))
    assert torch.get_num_threads() == before


def test_the_clock(capsys):
    def alone(rank, x):
        return x + rank.number

    clock(alone, torch.ones(3), num_ranks=1)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("alone: ") and first.endswith(" ms per token")
    assert second.startswith("    rank 0 computes ") and second.endswith(" ms and waits 0.0 ms")


def test_spans_of_a_token():
    turns = [Turn(10.0, 14.0, [(12.0, 13.0)]), Turn(10.5, 14.5, [])]
    assert spans_of(turns) == [
        [Span("compute", 0.0, 2.0), Span("wait", 2.0, 3.0), Span("compute", 3.0, 4.0)],
        [Span("compute", 0.5, 4.5)],
    ]


def made_up(seconds: list[float]) -> list[list[Span]]:
    """The meetings of steps of so many seconds. Rank 1 is late at the all-reduce, by a tenth of the
    step."""
    ranks: list[list[Span]] = [[], []]
    now = 0.0
    for length in seconds:
        for rank, late in enumerate((0.0, 0.1)):
            meets = now + length * (0.3 + late)
            summed = now + length * 0.5
            gathers = now + length * 0.6
            ranks[rank] += [
                Span("tell", now - 0.01, now),
                Span("add_up", meets, summed),
                Span("gather", gathers, now + length * 0.7),
            ]
        now += length
    return ranks


def test_the_fastest_step():
    """The first steps do not count."""
    meetings = made_up([0.5] * 5 + [1.0] * 8 + [0.8] + [1.0] * 3)
    first, second = (
        [(kind, round(a, 2), round(b, 2)) for kind, a, b in spans]
        for spans in fastest_step(meetings)
    )
    assert first == [
        ("compute", 0.0, 0.24),
        ("wait", 0.24, 0.32),
        ("add_up", 0.32, 0.4),
        ("compute", 0.4, 0.48),
        ("gather", 0.48, 0.56),
        ("sample", 0.56, 0.79),
        ("tell", 0.79, 0.8),
    ]
    assert [span for span in second if span[0] in ("compute", "wait", "add_up")] == [
        ("compute", 0.0, 0.32),
        ("add_up", 0.32, 0.4),
        ("compute", 0.4, 0.48),
        ("compute", 0.56, 0.79),
    ]


@pytest.mark.slow
def test_two_processes_come_to_the_same_places():
    needs_of("18")
    first, second = recorded(20)
    assert [span.kind for span in first] == [span.kind for span in second]
    assert sum(span.kind == "add_up" for span in first) % 11 == 0
