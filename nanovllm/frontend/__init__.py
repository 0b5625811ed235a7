"""Text in and out: prompts become requests, and tokens become text, stop strings looked for, and
outputs.
"""
