"""vAttention: the page table is the hardware's, so that attention reads contiguous memory."""
