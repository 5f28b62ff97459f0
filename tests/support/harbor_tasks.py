"""Harbor tasks of our own: small jobs on text files, each with data, a solution and tests that compare one file.

python -m tests.support.harbor_tasks DIRECTORY [COUNT]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

TASK_TOML = """version = "1.0"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 60.0

[agent]
timeout_sec = 300.0

[environment]
cpus = 1
memory_mb = 512
storage_mb = 256
"""
DOCKERFILE = """FROM debian:12
ENV TASK={name}
WORKDIR /app
COPY data ./
RUN sort data.txt > sorted.txt && mkdir -p /srv/$TASK
"""
TEST = """#!/bin/bash
# The agent's answer is compared with the expected one.
if cmp -s /tests/expected /app/answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE = """#!/bin/bash
set -e
cd /app
{command} > answer.txt
"""
AGENT = """#!/bin/bash
# Asks the model once, with the instruction, and runs its answer as a command.
server=${OPENAI_BASE_URL#http://}; address=${server%%/*}; path=/${server#*/}
instruction=$(tr -d '"' < "$OPENTINKER_INSTRUCTION" | tr '\\n' ' ')
body='{"model":"'$OPENAI_MODEL'","messages":[{"role":"user","content":"'$instruction'"}]}'
exec 3<>"/dev/tcp/${address%:*}/${address#*:}" || exit 7
head="POST $path/chat/completions HTTP/1.1\\r\\nHost: model\\r\\nContent-Type: application/json\\r\\n"
printf "${head}Connection: close\\r\\nContent-Length: %d\\r\\n\\r\\n%s" "${#body}" "$body" >&3
command=$(cat <&3 | sed -n 's/.*"content": *"\\([^"]*\\)".*/\\1/p')
echo "$command"
bash -c "$command"
"""
Kind = Callable[[list[str]], tuple[str, str, list[str]]]
"""Lines of data.txt -> instruction, solution, lines of the answer."""


def _sum(lines: list[str]) -> tuple[str, str, list[str]]:
    total = sum(int(line.split()[1]) for line in lines)
    return "the sum of the second column", "awk '{s += $2} END {print s}' data.txt", [str(total)]


def _largest(lines: list[str]) -> tuple[str, str, list[str]]:
    largest = max(int(line.split()[1]) for line in lines)
    return "the largest number of the second column", "awk '{print $2}' data.txt | sort -n | tail -1", [str(largest)]


def _names(lines: list[str]) -> tuple[str, str, list[str]]:
    names = sorted({line.split()[0] for line in lines})
    return "every word of the first column once, sorted", "cut -d' ' -f1 data.txt | LC_ALL=C sort -u", names


def _reverse(lines: list[str]) -> tuple[str, str, list[str]]:
    return "the lines in reverse order", "tac data.txt", lines[::-1]


def _count(lines: list[str]) -> tuple[str, str, list[str]]:
    word = lines[0].split()[0]
    count = sum(line.split()[0] == word for line in lines)
    return f"how many lines begin with the word {word}", f"grep -c '^{word} ' data.txt", [str(count)]


def _upper(lines: list[str]) -> tuple[str, str, list[str]]:
    return "the lines in capital letters", "tr a-z A-Z < data.txt", [line.upper() for line in lines]


def _even(lines: list[str]) -> tuple[str, str, list[str]]:
    even = [line for line in lines if int(line.split()[1]) % 2 == 0]
    return "the lines whose number is even", "awk '$2 % 2 == 0' data.txt", even


def _numbered(lines: list[str]) -> tuple[str, str, list[str]]:
    told = [f"{number}:{line}" for number, line in enumerate(lines, 1)]
    return "the lines, each after its number and a colon", "awk '{print NR \":\" $0}' data.txt", told


def _swapped(lines: list[str]) -> tuple[str, str, list[str]]:
    told = [" ".join(line.split()[::-1]) for line in lines]
    return "the lines with their two columns exchanged", "awk '{print $2, $1}' data.txt", told


def _third(lines: list[str]) -> tuple[str, str, list[str]]:
    return "every third line, from the third one on", "awk 'NR % 3 == 0' data.txt", lines[2::3]


KINDS: tuple[Kind, ...] = (_sum, _largest, _names, _reverse, _count, _upper, _even, _numbered, _swapped, _third)
WORDS = ("oak", "elm", "fir", "ash", "yew", "box", "bay", "fig")


def write_task(folder: Path, number: int = 0) -> Path:
    """Write task `number`; the same number gives the same task."""
    draw = random.Random(f"harbor/{number}")
    lines = [f"{draw.choice(WORDS)} {draw.randint(0, 999)}" for _ in range(draw.randint(12, 40))]
    what, command, answer = KINDS[number % len(KINDS)](lines)
    texts = {
        "task.toml": TASK_TOML,
        "instruction.md": f"/app/data.txt holds a word and a number in each line.\nWrite {what} to /app/answer.txt.\n",
        "environment/Dockerfile": DOCKERFILE.format(name=folder.name),
        "environment/data/data.txt": "\n".join(lines) + "\n",
        "tests/test.sh": TEST,
        "tests/expected": "\n".join(answer) + "\n",
        "solution/solve.sh": SOLVE.format(command=command),
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write_tasks(directory: Path, count: int = 50) -> Path:
    for number in range(count):
        write_task(directory / f"task-{number:02}", number)
    return directory


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50)
