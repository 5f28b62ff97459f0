"""An agent that calls the OpenAI API: it asks the model to copy two digits, each in a separate conversation.

Started once per episode by the environment `agent_program` (examples/two_calls.toml). It imports few
modules, all of the standard library, because most of an episode's time is the start of this program.
"""

import http.client
import json
import os
import random

host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
digits = random.Random(f"{os.environ['OPENTINKER_SEED']}/{os.environ['OPENTINKER_ROW']}").choices("0123456789", k=2)


def ask(question: str) -> tuple[str, bool]:
    """Return the model's answer, and whether it ended with the stop token."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": question}]}
    server = http.client.HTTPConnection(host)
    server.request("POST", f"/{path}/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    choice = json.load(server.getresponse())["choices"][0]
    server.close()
    return choice["message"]["content"], choice["finish_reason"] == "stop"


said = [ask(f"{digit}=") for digit in digits]
exact = [answer == (digit, True) for answer, digit in zip(said, digits, strict=True)]
shares = [
    ((text[:1] == digit) + (ended and len(text) == 1)) / max(2, len(text) + ended)  # right tokens, the end being one
    for (text, ended), digit in zip(said, digits, strict=True)
]
os.write(1, json.dumps({"reward": sum(shares) / 2, "metrics": {"exact": float(all(exact))}}).encode())
