"""Groups: several sequences of one request (paper, sections 4.4 and 4.5). Imports no torch.

They are scheduled and preempted together. Before they fork, only the first one runs, up to the last
token that all of them share.
"""

from os.path import commonprefix

from nanovllm.block_manager import BlockManager
from nanovllm.schedule import Item, Schedule
from nanovllm.sequence import Request
from nanovllm.topics.swapping.blocks import swap_in


def share(request: Request, manager: BlockManager) -> None:
    """The request has been admitted: what its sequences share is computed once.

    Sets `num_shared_tokens`: how many tokens all unfinished sequences have in common at their
    start. Where the lengths differ, the shortest sequence keeps its last token for itself: its next
    token is sampled there. Then forks, which may already be possible.
    """
    token_ids = [seq.token_ids for seq in request.unfinished]
    # of lists: for paths it is of no use
    num_shared = len(commonprefix(token_ids))  # noqa: RUF071
    shortest, *_, longest = sorted(map(len, token_ids))
    if shortest < longest:  # its last token stays its own: the next step samples from it
        num_shared = min(num_shared, shortest - 1)
    request.num_shared_tokens = num_shared
    fork(request, manager)


def fork(request: Request, manager: BlockManager) -> None:
    """Once the first sequence has computed the tokens that all share, the others fork from it.

    `share` calls it, and the scheduler after each step, before new tokens are appended. A sequence
    that was preempted with tokens of its own takes more than the shared ones: what the prefix cache
    still has (`take_prefix`), then what the host has (`swap_in`). At the end, `has_forked` is True.
    """
    num_shared = request.num_shared_tokens
    first, *others = request.unfinished
    if first.num_computed_tokens < num_shared:
        return
    for seq in others:
        if len(seq) > num_shared:  # it was preempted: its own blocks may still be in the cache
            num_full = num_shared // manager.block_size
            manager.fork(first, seq, num_full * manager.block_size)
            manager.take_prefix(seq)
            if seq.num_host_tokens >= num_shared:
                swap_in(manager, seq)
        if seq.num_computed_tokens < num_shared:
            manager.free(seq)
            manager.fork(first, seq, num_shared)
    request.has_forked = True


def tokens_to_compute(request: Request, schedule: Schedule) -> list[Item]:
    """The sequences get their next tokens together or not at all, so their last tokens are
    computed in the same step.

    Before the fork: tokens of the first sequence, up to `num_shared_tokens`. After the fork, if one
    is missing more than its last token: as many missing tokens as both budgets have room for, and
    no last tokens. Items are not yet in the schedule, so its budgets do not fall meanwhile.
    """
    seqs = request.unfinished
    if not request.has_forked:
        num_missing = request.num_shared_tokens - seqs[0].num_computed_tokens
        return schedule.next_tokens(seqs[0], num_missing)
    # the last token is never fed to the model; it may be pending (chapter 11)
    most = request.max_len - 1
    missing = [min(len(seq), most) - seq.num_computed_tokens for seq in seqs]
    if max(missing) == 0:
        return []
    if max(missing) == 1:
        if len(seqs) > schedule.tokens_left:
            return []
        return [Item(seq, seq.num_computed_tokens, 1) for seq in seqs]
    items = []
    budget = min(schedule.tokens_left, schedule.prompt_tokens_left)
    for seq, num_missing in zip(seqs, missing):
        num_tokens = min(num_missing - 1, budget)
        if num_tokens > 0:
            items.append(Item(seq, seq.num_computed_tokens, num_tokens))
            budget -= num_tokens
    return items
