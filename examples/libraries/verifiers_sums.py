"""An environment of the verifiers library (0.1), for `environment.name = "verifiers"`: sums, with an answer in a box.

uv venv /opt/verifiers && uv pip install --python /opt/verifiers verifiers==0.1.14
[environment]
name = "verifiers"
config = { id = "verifiers_sums", python = "/opt/verifiers/bin/python", paths = ["examples/libraries"] }
"""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

SYSTEM = "Think step by step, then give the answer in \\boxed{}."


def load_environment(largest: int = 20) -> vf.Environment:
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(10, largest) for b in (17, 28)]
    parser = vf.Parser(vf.extract_boxed_answer)

    def right(completion: vf.Messages, answer: str, parser: vf.Parser, **_: object) -> float:
        return float(parser.parse_answer(completion) == answer)

    rubric = vf.Rubric(funcs=[right], parser=parser)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), system_prompt=SYSTEM, parser=parser, rubric=rubric)
