"""Text in and out: prompts, tokens to text, stop strings, outputs, streams.

Chapters: 09_engine.
"""
