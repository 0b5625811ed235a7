"""The first minutes on a GPU: what runs, whether it is right, how fast it is.

scripts/first_contact is the command. Each file here is one of its parts, but for section and start,
which the parts share.
"""
