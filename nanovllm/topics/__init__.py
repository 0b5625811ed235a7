"""Topics: what a plain prompt does not need. Each folder is a topic with a chapter of its own.

The core imports a topic where its option, its parameter or a request's kind asks for it.
"""
