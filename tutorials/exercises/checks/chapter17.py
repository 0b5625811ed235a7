"""Checks of chapter 17: the events of a stream, a client that leaves, the engine's thread."""

import asyncio
import gc
import json
import random
from collections.abc import Callable, Iterator
from inspect import CORO_CLOSED, CORO_CREATED, getcoroutinestate
from itertools import accumulate
from queue import Empty

from nanovllm import LLM, SamplingParams
from tutorials.exercises.checks.expect import Wrong, counted, expect, expect_linear

# --- 17.1 ---

SAID = ["a fox ", "\N{GRINNING FACE}", "", "data: [DONE]", "\nand \u00fc", "end"]
COMMENT = b": the answer is still to come\n\n"
DONE = b"data: [DONE]\n\n"


def event(content: dict) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def events() -> list[bytes]:
    """Of a stream, with a comment among them, and an event that has no choice."""
    said = [event({"choices": [{"index": 0, "text": text}]}) for text in SAID]
    said[2] = b": 3\n" + said[2]  # an event with a line of comment
    return [*said[:2], COMMENT, *said[2:], event({"choices": [], "usage": {}}), DONE]


def pieces_of(data: bytes, rng: random.Random) -> list[bytes]:
    cuts = sorted(rng.sample(range(1, len(data)), rng.randint(0, 12)))
    return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)])]


def check_1(answers) -> None:
    rng = random.Random(0)
    data = b"".join(events())
    cases = [[data], [data[i : i + 1] for i in range(len(data))], events()]
    cases += [pieces_of(data, rng) for _ in range(100)]
    for pieces in cases:
        judge_stream(answers, pieces)
    for pieces in ([], events()[:-1], [data[:-5]]):
        try:
            found = [*answers.texts(iter(pieces))]
        except EOFError:
            continue
        raise Wrong(f"a stream was cut off before [DONE]: no EOFError, but {len(found)} texts")
    said = event({"choices": [{"index": 0, "text": "a fox"}]})
    expect_linear("events", lambda num: lambda: [*answers.texts(iter([said] * num + [DONE]))], 50)


def judge_stream(answers, pieces: list[bytes]) -> None:
    """All texts come, and each when its event is complete."""
    num_taken = 0

    def coming() -> Iterator[bytes]:
        nonlocal num_taken
        for piece in pieces:
            num_taken += 1
            yield piece

    case = f"a stream in {len(pieces)} pieces" if len(pieces) > 1 else "a stream in one piece"
    ends = [*accumulate(map(len, events()))]
    del ends[2]  # of the comment
    have = [*accumulate(map(len, pieces))]
    found = []
    texts = answers.texts(coming())
    while (text := following(texts, case)) is not None:
        found.append(text)
        wanted = SAID[: len(found)]
        expect(found == wanted, f"{case}: text {len(found)} is {text!r}, not {wanted[-1:]}")
        latest = 1 + next(
            i for i, num_bytes in enumerate(have) if num_bytes >= ends[len(found) - 1]
        )
        late = f"{case}: text {len(found)} is complete after {latest} of them"
        expect(num_taken <= latest, f"{late}, and comes after {num_taken}")
    expect(found == SAID, f"{case}: {len(found)} of {len(SAID)} texts have come")


def following(texts: Iterator[str], case: str) -> str | None:
    try:
        return next(texts, None)
    except EOFError as error:
        raise Wrong(f"{case}: EOFError, though it ends with [DONE]") from error


# --- 17.2 ---
class Work:
    """A coroutine that waits for an event. If it is cancelled, it needs some turns to clean up."""

    def __init__(self, result: object = None, has_ended: bool = False):
        self.go = asyncio.Event()
        if has_ended:
            self.go.set()
        self.result = result
        self.coroutine = self.run()
        self.state = ""  # when unless_left ends

    async def run(self) -> object:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            await turns(3)
            raise
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def outcome(answers, work: Work, left: Work, when: str) -> object:
    """What unless_left returns or raises, if something happens after some turns of the loop."""

    async def watched() -> object:
        try:
            return await answers.unless_left(work.coroutine, left.coroutine)
        finally:
            for one in (work, left):
                one.state = getcoroutinestate(one.coroutine)
                if one.state == CORO_CREATED:  # it was not begun: no warning of that
                    one.coroutine.close()

    call = asyncio.ensure_future(watched())
    await turns()
    if when == "done":
        work.go.set()
    elif when == "left":
        left.go.set()
    elif when == "both":
        left.go.set()
        work.go.set()
    elif when == "cancelled":
        call.cancel()
    await turns()
    if not call.done():
        call.cancel()
        await turns()
        return "nothing: it still waits"
    if call.cancelled():
        return "a CancelledError"
    error = call.exception()
    if error is not None and error is not work.result and not isinstance(error, answers.Left):
        raise error
    return error or call.result()


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def check_2(answers) -> None:
    error = ValueError("no such model")
    happens = {
        "done": "the work ends",
        "left": "the client hangs up",
        "both": "both end in the same moment",
        "cancelled": "unless_left itself is cancelled",
        "at once": "the work ends at once",
    }
    for when, result in [
        ("done", 5),
        ("done", error),
        ("left", 5),
        ("both", 5),
        ("cancelled", 5),
        ("at once", 5),
    ]:
        asyncio.run(judge_leaving(answers, when, result, happens[when]))


async def judge_leaving(answers, when: str, result: object, what: str) -> None:
    if isinstance(result, Exception):
        what += " with an exception"
    work = Work(result, has_ended=when == "at once")
    left = Work()
    found = await outcome(answers, work, left, when)
    is_right = found is result
    wanted = repr(result)
    if when == "left":
        is_right = isinstance(found, answers.Left)
        wanted = "Left"
    elif when == "cancelled":
        is_right = found == "a CancelledError"
        wanted = "a CancelledError"
    expect(is_right, f"{what}: {wanted} should come of it, but it is {found!r}")
    for name, one in {"work": work, "left": left}.items():
        said = f"{what}: `{name}` still runs when unless_left ends"
        expect(one.state == CORO_CLOSED, said)


# --- 17.3 ---
class Counts:
    """In the place of the model: the tokens of each answer are 100, 101, 102, ..."""

    num_blocks, num_host_blocks = 64, 0

    def launch(self, schedule):
        drawn = [100 + seq.num_output_tokens for seq in schedule.sampled]
        return lambda: (drawn, None)


Message = tuple | None


class Inbox:
    """As a SimpleQueue, with a script: each message comes after a number of steps. If all requests have
    ended before, `get` waits for it."""

    def __init__(self, llm: LLM, script: list[tuple[int, Message]]):
        self.llm = llm
        self.script = [*script]
        self.num_steps = 0  # that were run, or in whose time it has waited
        self.num_asked = 0  # in vain, since the last step or message
        self.left: set[str] = set()
        self.at_end: Callable[[], None] = lambda: None
        llm.observers.append(self.see)

    def see(self, schedule, seconds) -> None:
        self.num_steps += 1
        self.num_asked = 0
        names = {item.seq.request.request_id for item in schedule.items}
        late = sorted(names & self.left)
        expect(not late, f"a step computes {late}, though the client has left")
        expect(self.num_steps < 100, "it goes on, though None is in the inbox")

    def has_message(self) -> bool:
        return bool(self.script) and self.script[0][0] <= self.num_steps

    def empty(self) -> bool:
        if self.has_message():
            return False
        self.num_asked += 1
        said = "nothing is to be computed, and it asks the inbox again and again: it should wait"
        expect(self.llm.has_unfinished() or self.num_asked < 20, f"{said} in get()")
        return True

    def qsize(self) -> int:
        return 0 if self.empty() else sum(step <= self.num_steps for step, _ in self.script)

    def get(self, block: bool = True, timeout: float | None = None) -> Message:
        if not self.has_message():
            if not block or timeout is not None:
                self.empty()
                raise Empty
            said = f"after step {self.num_steps} it waits for the inbox while requests run"
            expect(not self.llm.has_unfinished(), said)
            expect(self.script, "it goes on, though it has taken None")
        self.num_asked = 0
        step, message = self.script.pop(0)
        if message is None:
            self.at_end()
        self.num_steps = max(step, self.num_steps)
        if message and message[0] == "leave":
            self.left.add(str(message[1]))
        elif message:
            self.left.discard(message[1])
        return message

    def get_nowait(self) -> Message:
        return self.get(block=False)


def add(name: str, num_tokens: int, prompt: list[int] | None = None) -> Message:
    return "add", name, prompt or [5, 6, 7], SamplingParams(max_tokens=num_tokens)


SCRIPT: list[tuple[int, Message]] = [
    (0, add("a", 6)),
    (0, add("b", 3)),
    (2, ("leave", "a")),
    (2, add("c", 3)),
    (2, ("leave", "x")),  # there is no such request
    (6, add("d", 2)),  # all others have ended
    (7, add("e", 2, [5] * 5000)),  # too long for the model
    (9, add("f", 9)),  # comes and leaves before a step
    (9, ("leave", "f")),
    (10, add("a", 1)),  # another client, with the name of one that has left
    (10, add("g", 9)),
    (12, None),
]
TOLD = [  # by each call
    [("a", [100], False), ("b", [100], False)],
    [("a", [101], False), ("b", [101], False)],
    [("b", [102], True), ("c", [100], False)],
    [("c", [101], False)],
    [("c", [102], True)],
    [("d", [100], False)],
    [("e", [], True)],
    [("d", [101], True)],
    [("a", [100], True), ("g", [100], False)],
    [("g", [101], False)],
]


def check_3(answers) -> None:
    llm = LLM(runner=Counts())
    told: list[list] = []

    def tell(news) -> None:
        told.append(sorted((name, [*tokens], bool(is_last)) for name, tokens, is_last in news))
        i = len(told) - 1
        wanted = TOLD[i] if i < len(TOLD) else "no other"
        text = f"call {i + 1} of tell brings {told[i]}, and should bring {wanted}"
        expect(told[i] == wanted, text)

    answers.run(llm, Inbox(llm, SCRIPT), tell)
    missing = TOLD[len(told) :]
    expect(not missing, f"it has ended after {len(told)} calls of tell: {missing[:1]} is missing")
    judge_memory(answers)


def judge_memory(answers) -> None:
    """Forty requests come one after the other, and have ended. Every fourth client leaves before."""
    name_cls = counted(str)
    script: list[tuple[int, Message]] = []
    for i in range(40):
        name = name_cls(f"r{i}")
        script += [(2 * i, add(name, 1 + i % 2))]
        script += [(2 * i + 1, ("leave", name))] * (i % 4 == 3)
    del name
    llm = LLM(runner=Counts())
    inbox = Inbox(llm, [*script, (99, None)])
    script.clear()

    def look() -> None:
        gc.collect()
        said = f"40 requests have ended, and {name_cls.num_alive} of their names are kept"
        expect(name_cls.num_alive <= 4, said)

    inbox.at_end = look
    answers.run(llm, inbox, lambda news: None)
