"""Text in and out: prompts, tokens to text, stop strings, outputs, streams.

Chapters: 08_engine.
"""
