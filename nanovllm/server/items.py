"""Items: what an answer of /v1/responses consists of."""

from typing import Any
from uuid import uuid4

from nanovllm.server.answers import encode
from nanovllm.server.parsing import Parts


class Items:
    """What an answer consists of, as it comes, and the events that tell of it."""

    def __init__(self) -> None:
        self.output: list[dict] = []
        self.events: list[str] = []
        self.num_events = 0
        self.is_open = False

    @property
    def index(self) -> int:
        return len(self.output) - 1

    def tell(self, kind: str, **content: Any) -> None:
        data = {"type": kind, "sequence_number": self.num_events, **content}
        self.num_events += 1
        self.events.append(f"event: {kind}\ndata: {encode(data)}\n\n")

    def take(self) -> list[str]:
        taken = self.events
        self.events = []
        return taken

    def add(self, parts: Parts) -> None:
        if parts.reasoning:
            self.add_text("reasoning", parts.reasoning)
        if parts.content:
            self.add_text("message", parts.content)
        for call in parts.tool_calls:
            self.add_call(call)

    def add_text(self, kind: str, text: str) -> None:
        if not self.is_open or self.output[-1]["type"] != kind:
            self.close()
            self.open(kind)
        content = self.output[-1]["content"][0]
        content["text"] += text
        self.tell(f"response.{content['type']}.delta", **self.place(), delta=text, **extra(content))

    def open(self, kind: str) -> None:
        content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"type": kind, "id": f"rs_{uuid4().hex}", "summary": []}
        if kind == "message":
            content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": kind, "id": f"msg_{uuid4().hex}", "role": "assistant"}
        self.add_item({**item, "status": "in_progress", "content": []})
        self.output[-1]["content"].append(content)
        self.tell("response.content_part.added", **self.place(), part=content)
        self.is_open = True

    def close(self, status: str = "completed") -> None:
        """Ends the text that is open, if there is one."""
        if not self.is_open:
            return
        self.is_open = False
        content = self.output[-1]["content"][0]
        done = {**self.place(), "text": content["text"], **extra(content)}
        self.tell(f"response.{content['type']}.done", **done)
        self.tell("response.content_part.done", **self.place(), part=content)
        self.end_item(status)

    def add_call(self, call: dict) -> None:
        self.close()
        arguments = call["function"]["arguments"]
        item = {
            "type": "function_call",
            "id": f"fc_{uuid4().hex}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": "",
            "status": "in_progress",
        }
        self.add_item(item)
        place = {"item_id": item["id"], "output_index": self.index}
        self.tell("response.function_call_arguments.delta", **place, delta=arguments)
        done = {"name": item["name"], "arguments": arguments}
        self.tell("response.function_call_arguments.done", **place, **done)
        item["arguments"] = arguments
        self.end_item("completed")

    def add_item(self, item: dict) -> None:
        self.output.append(item)
        self.tell("response.output_item.added", output_index=self.index, item=item)

    def end_item(self, status: str) -> None:
        item = self.output[-1]
        item["status"] = status
        self.tell("response.output_item.done", output_index=self.index, item=item)

    def place(self) -> dict[str, Any]:
        item_id = self.output[-1]["id"]
        return {"item_id": item_id, "output_index": self.index, "content_index": 0}


def extra(content: dict) -> dict:
    """What events of an answer's text have, and those of its reasoning do not."""
    return {"logprobs": []} if content["type"] == "output_text" else {}
