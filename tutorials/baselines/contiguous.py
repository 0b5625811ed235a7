"""What the PagedAttention paper compares with: every sequence gets one contiguous piece of the
cache when it starts.

Orca's authors did not publish their code, so the paper's authors wrote it again in three variants,
which differ in how much they reserve, on top of a buddy allocator (section 6.1). So do we. To try
one in the engine:

    LLM(block_manager_cls=OrcaPow2, block_size=1)
"""

from nanovllm.block_manager import BlockManager
from nanovllm.sequence import Request, Sequence
from nanovllm.topics.decoding.beam_search import BeamRequest


def log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


class ContiguousBlockManager(BlockManager):
    """Runs of 2**k neighboring blocks from a buddy allocator, one for each sequence, reserved
    before its first step.

    A run is cut in halves until it is just large enough; when both halves are free again they
    become one. Nothing is shared: samples of a prompt hold it once each, and copy it when they
    fork. No prefixes are found, nothing is swapped, and beams, which are new sequences after every
    token, are refused."""

    max_model_len = 2048  # of the paper's OPT models; subclasses may have another

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ):
        super().__init__(num_blocks, block_size, enable_prefix_caching=False)
        num_sizes = num_blocks.bit_length()
        self.free_runs = [set[int]() for _ in range(num_sizes)]  # [k]: where 2**k blocks begin
        self.copies: dict[Sequence, list[tuple[int, int]]] = {}  # what a fork has yet to copy
        start = 0
        for k in reversed(range(num_sizes)):
            if num_blocks >> k & 1:
                self.free_runs[k].add(start)
                start += 2**k

    def tokens_to_reserve(self, request: Request) -> int:
        raise NotImplementedError

    def size_for(self, request: Request) -> int:
        """k, for runs of 2**k blocks."""
        num_tokens = min(self.tokens_to_reserve(request), self.max_model_len)
        return log2_ceil(self.num_blocks_for(num_tokens))

    # --- what the scheduler asks ---

    def max_blocks_needed(self, request: Request) -> int:
        if isinstance(request, BeamRequest):
            name = type(self).__name__
            raise ValueError(f"beam search is not possible with {name}: use BlockManager")
        if request.max_len - 1 > self.max_model_len:
            limit = f"{type(self).__name__}.max_model_len={self.max_model_len}"
            raise ValueError(f"the request may cache {request.max_len - 1} tokens, but {limit}")
        return request.params.n * 2 ** self.size_for(request)

    def longest_that_fits(self, request: Request) -> int:
        """The largest run of which there may be one for each sequence, filled."""
        num_runs = len(self.blocks) // request.params.n
        size = 2 ** (num_runs.bit_length() - 1) if num_runs else 0
        return size * self.block_size + 1

    def can_admit(self, request: Request, num_reserved: int = 0) -> bool:
        """It needs a run for each sequence. After that it has all that it will ever need."""
        k = self.size_for(request)
        num_runs = sum(len(self.free_runs[i]) << (i - k) for i in range(k, len(self.free_runs)))
        return num_runs >= len(request.unfinished)

    def num_blocks_at_fork(self, request: Request) -> int:
        return 0

    # --- what it tells us to do ---

    def allocate(self, seq: Sequence, num_tokens: int) -> None:
        if not seq.block_table:
            for member in seq.request.unfinished:
                self._reserve(member)
        self.moves.copies += self.copies.pop(seq, [])

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> None:
        """Everything is copied, before the next step."""
        num_tokens = parent.num_computed_tokens if num_tokens is None else num_tokens
        if not child.block_table:
            self._reserve(child)
        child.num_computed_tokens = num_tokens
        source = parent.block_table[: self.num_blocks_for(num_tokens)]
        self.copies[child] = list(zip(source, child.block_table))

    def free(self, seq: Sequence) -> None:
        self.copies.pop(seq, None)
        if seq.block_table:
            self._give_back(seq.block_table)
        seq.block_table, seq.num_computed_tokens = [], 0

    # --- the buddy allocator ---

    def _reserve(self, seq: Sequence) -> None:
        k = self.size_for(seq.request)
        size = next(i for i in range(k, len(self.free_runs)) if self.free_runs[i])
        start = min(self.free_runs[size])
        self.free_runs[size].remove(start)
        while size > k:  # keep the left half, free the right one
            size -= 1
            self.free_runs[size].add(start + 2**size)
        seq.block_table = list(range(start, start + 2**k))
        for block_id in seq.block_table:
            del self.free_blocks[block_id]
            self.blocks[block_id].ref_count = 1

    def _give_back(self, run: list[int]) -> None:
        for block_id in run:
            self.free_blocks[block_id] = None
            self.blocks[block_id].ref_count = 0
        start, k = run[0], log2_ceil(len(run))
        # while the other half, which differs in one bit, is free as well
        while start ^ 2**k in self.free_runs[k]:
            self.free_runs[k].remove(start ^ 2**k)
            start, k = start & ~(2**k), k + 1
        self.free_runs[k].add(start)


class OrcaMax(ContiguousBlockManager):
    """Reserves the most that any request may need."""

    def tokens_to_reserve(self, request: Request) -> int:
        return self.max_model_len


class OrcaPow2(ContiguousBlockManager):
    """Knows the output's length up to a factor of two: for 25 tokens it reserves 32."""

    def tokens_to_reserve(self, request: Request) -> int:
        return len(request.prompt_token_ids) + 2 ** log2_ceil(request.params.max_tokens)


class OrcaOracle(ContiguousBlockManager):
    """Knows the output's length, which no real system does."""

    def tokens_to_reserve(self, request: Request) -> int:
        return len(request.prompt_token_ids) + request.params.max_tokens
