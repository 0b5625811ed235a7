"""vAttention: the processor's page table in place of block tables.

Chapters: 20_vattention.
"""
