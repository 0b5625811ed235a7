"""The first minutes on a GPU: what runs, whether it is right, how fast it is.

A program in parts: __main__ is the command, apart starts each section in a process of its own,
section is what the sections share, and the other files are the sections.
"""
