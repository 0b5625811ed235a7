"""A stream through OpenAI's client, from a server that `nanovllm serve` has started.

python -m tutorials.serving.openai_client
"""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
story = [{"role": "user", "content": "tell me a story about an owl"}]
for chunk in client.chat.completions.create(model=model, messages=story, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
