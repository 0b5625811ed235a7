"""The server: an OpenAI-compatible API over an engine or replicas on Ray, its web page, and the
command line.
"""
