"""An agent for Harbor tasks (environment `harbor_agent`): the model's answers are shell commands, and it reads what
they print, until it answers `done`. It needs the standard library alone, because the task's sandbox has nothing else.
"""

import json
import os
import subprocess
import urllib.request
from pathlib import Path

TURNS = 8
PRINTED = 2000
"""Characters of a command's output that the model reads."""
TASK = "Answer with one shell command and nothing else, or with `done`.\n\n"


def ask(messages: list[dict[str, str]]) -> str:
    """Return the model's answer."""
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
    return said.strip()


def main() -> None:
    task = TASK + Path(os.environ["OPENTINKER_INSTRUCTION"]).read_text()
    messages = [{"role": "user", "content": task}]
    for _ in range(TURNS):
        command = ask(messages)
        if command == "done":
            return
        ran = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        printed = ran.stdout.decode(errors="replace")[:PRINTED]
        told = f"exit status {ran.returncode}\n{printed}"
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": told}]


if __name__ == "__main__":
    main()
