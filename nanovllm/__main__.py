"""python -m nanovllm"""

from nanovllm.topics.server.cli import main

main()
