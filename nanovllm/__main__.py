"""python -m nanovllm"""

from nanovllm.cli import main

main()
