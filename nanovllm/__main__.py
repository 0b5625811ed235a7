"""python -m nanovllm"""

from nanovllm.server.cli import main

main()
