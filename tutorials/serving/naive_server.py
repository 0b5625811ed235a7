"""The naive server of chapter 17: one request at a time, and no word before the answer is complete.

python -m tutorials.serving.naive_server PORT
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from nanovllm import LLM, SamplingParams


class NaiveServer(HTTPServer):
    request_queue_size = 1024  # callers that the system lets wait

    def __init__(self, llm: LLM, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.llm = llm


class Handler(BaseHTTPRequestHandler):
    server: NaiveServer
    wbufsize = -1  # an answer is written at once

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True)
        (output,) = self.server.llm.generate(body["prompt"], params, use_tqdm=False)
        (one,) = output.outputs
        usage = {"completion_tokens": len(one.token_ids)}
        answer = json.dumps({"choices": [{"text": one.text}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args) -> None:
        """Says nothing."""


if __name__ == "__main__":
    NaiveServer(LLM(), int(sys.argv[1])).serve_forever()
