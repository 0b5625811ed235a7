"""OpenAI's API over one engine or replicas, the page, the command line.

Chapters: 14_serving, 16_beyond.
"""
