"""Checks of chapter 02: prefixes that hit, another order of eviction, blocks that are twice there."""

from collections import Counter
from collections.abc import Iterator

from nanovllm import LLM, SamplingParams
from nanovllm.block_manager import EMPTY_PREFIX, BlockManager
from nanovllm.sequence import Request, Sequence
from nanovllm.topics.checks.blocks import check_blocks
from tutorials.exercises.checks.expect import expect

NAMES = "Ada Ben Carla David Elena Felix Greta Hugo Ines Jack Kira Leo Mia Noah Olga Paul".split()
BOOK = "\n".join(f"{name} {1000 + 271 * i}" for i, name in enumerate(NAMES))
CHAT = [{"role": "user", "content": f"phone book:\n{BOOK}\nwhat is Mia's number?"}]


def sequence(tokens) -> Sequence:
    return Request("r", None, [*tokens], SamplingParams()).sequences[0]


def compute(manager: BlockManager, seq: Sequence) -> int:
    """Lets the sequence take what it finds, and computes the rest. Returns how many tokens hit."""
    manager.take_prefix(seq)
    num_hit = seq.num_computed_tokens
    manager.allocate(seq, seq.num_missing_tokens)
    manager.cache_full_blocks(seq, len(seq))
    seq.num_computed_tokens = len(seq)
    manager.unwritten.clear()
    return num_hit


def check_1(answers) -> None:
    for n in (*range(1, 100), 255, 256, 257, 999, 1000, 1024):
        manager = BlockManager(num_blocks=64, block_size=16)
        for _ in range(2):
            seq = sequence(range(n))
            num_hit = compute(manager, seq)
            manager.free(seq)
        said = answers.hits(n)
        expect(said == num_hit, f"of {n} tokens {num_hit} hit, but hits({n}) is {said}")


def hits_in_turn(manager: BlockManager) -> int:
    """How many of 180 requests hit, if nine prompts of one block come in turn."""
    num_hits = 0
    for i in range(180):
        seq = sequence([i % 9] * 4 + [1000 + i])
        num_hits += compute(manager, seq) // 4
        manager.free(seq)
        check_blocks(manager, [])
    return num_hits


def check_2(answers) -> None:
    # nine blocks: one for the last token
    num_hits = hits_in_turn(answers.MostRecent(num_blocks=9, block_size=4))
    said = (
        f"nine prompts in turn, room for eight: {num_hits} of 180 requests hit; more than 100 can"
    )
    expect(num_hits > 100, said)
    check_taken(answers.MostRecent(num_blocks=3, block_size=4))


def check_taken(manager: BlockManager) -> None:
    """Three blocks are free, and all can be found: the last one is taken, and can be found no more."""
    seqs = [sequence([token] * 4) for token in range(3)]
    for seq in seqs:
        compute(manager, seq)
    (last,) = seqs[1].block_table
    for i in (0, 2, 1):
        manager.free(seqs[i])
    taken = manager.take_block()
    what = f"blocks were freed in this order: 0, 2, 1. It takes block {taken.id}"
    expect(taken.id == last, f"{what}, and not the last one")
    is_found = taken.key is not None or taken in manager.cached_blocks.values()
    what = f"block {taken.id} is taken, and its old prefix can still be found"
    expect(not is_found, f"{what}: it would hit what another sequence overwrites")


def check_3(answers) -> None:
    llm = LLM(num_blocks=64, block_manager_cls=answers.NoDuplicates)
    blocks = llm.block_manager
    duplicates: list[str] = []

    def observe(schedule, seconds: float) -> None:
        check_blocks(blocks, [seq for r in llm.scheduler.running for seq in r.unfinished])
        writers: Counter[int] = Counter()
        for seq, start, num_tokens in schedule.items:
            written = slice(start // 16, -(-(start + num_tokens) // 16))
            writers.update(seq.block_table[written])
        for block, count in writers.items():
            expect(count == 1, f"{count} sequences write into block {block} in the same step")
        for seq, start, num_tokens in schedule.items:
            if seq.block_table and (start + num_tokens) // 16 > start // 16:  # it was cached
                duplicates.extend(kept_duplicates(blocks, seq, start // 16))

    llm.observers.append(observe)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = llm.chat([CHAT] * 4, long, use_tqdm=False)
    num_answers = len({(*output.outputs[0].token_ids,) for output in outputs})
    expect(num_answers == 1, f"four equal prompts have {num_answers} different answers")
    peak = llm.stats()["kv_blocks_used_peak"]
    expect(peak <= 18, f"{peak} blocks were in use at a time; 18 are enough, BlockManager needs 24")
    left = llm.stats()["kv_blocks_used"]
    expect(left == 0, f"all answers have ended, but {left} blocks are still in use")
    # the second one fills a block just after the first one, which had the same, has ended
    (prompt,) = llm.chat([CHAT], SamplingParams(max_tokens=1), use_tqdm=False)
    num_prompt = len(prompt.prompt_token_ids)
    short = SamplingParams(temperature=0, max_tokens=33 - num_prompt % 16, ignore_eos=True)
    llm.reset_prefix_cache()
    llm.add_request({"messages": CHAT}, short)
    llm.step()
    llm.add_request({"messages": CHAT}, long)
    while llm.has_unfinished():
        llm.step()
    expect(not duplicates, "".join(duplicates[:1]))
    check_owners_of_both(answers.NoDuplicates(num_blocks=16, block_size=4))


def kept_duplicates(manager: BlockManager, seq: Sequence, num_full: int) -> Iterator[str]:
    """Of its first blocks, which earlier steps have filled: those that another one could replace."""
    for i in range(num_full):
        prefix_id = seq.prefix_ids[i - 1] if i else EMPTY_PREFIX
        size = manager.block_size
        tokens = tuple(seq.token_ids[i * size : (i + 1) * size])
        block = manager.cached_blocks.get((prefix_id, tokens))
        if block is not None and block.id != seq.block_table[i]:
            state = "free" if block.id in manager.free_blocks else "in use"
            what = f"block {block.id} is {state} and has the prefix of block {seq.block_table[i]}"
            yield f"{what}, which a sequence keeps: it should take block {block.id}"


def check_owners_of_both(manager: BlockManager) -> None:
    """A block that is given back may have another owner: here a sequence that was forked."""
    first, second = sequence(range(12)), sequence(range(12))
    child = Request("r", None, [*range(12)], SamplingParams()).sequences[0]
    compute(manager, first)
    manager.allocate(second, 12)  # in the same step as the first one: nothing is found
    second.num_computed_tokens = 12
    own = [*second.block_table]
    manager.fork(second, child)
    manager.cache_full_blocks(second, 12)
    counts = [manager.blocks[i].ref_count for i in own]
    what = f"the blocks {own} have another owner still, but their ref_counts are {counts}"
    expect(second.block_table != own and counts == [1, 1, 1], what)
