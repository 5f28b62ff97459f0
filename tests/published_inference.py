"""The third program of the published interface: an inference job, and a game played by its model; run by the tests.

python tests/published_inference.py URL MODEL OUT
"""

import sys

from opentinker.client.utils.http_training_client import InferenceSchedulerClient
from opentinker.environment import AbstractGame, StepResult
from opentinker.environment.inference_pipeline import run_inference

URL, MODEL, OUT = sys.argv[1:]


class EchoGame(AbstractGame):
    def reset(self, ground_truth="", **kwargs):  # type: ignore[no-untyped-def]
        self.truth = str(ground_truth)
        return "Repeat it."

    def step(self, action):  # type: ignore[no-untyped-def]
        return StepResult("", float(action == self.truth), True, {"said": action})

    def get_system_prompt(self):  # type: ignore[no-untyped-def]
        return "You repeat digits."

    def get_initial_user_message(self):  # type: ignore[no-untyped-def]
        return ""


# Submit an inference job
inference_scheduler = InferenceSchedulerClient(url=URL)
job = inference_scheduler.submit_inference_job(
    model_path=MODEL,
    tensor_parallel_size=1,
    num_gpus=1,
    opentinker={"rollout": {"engine": "toy", "toy": {"skill": 1.0}}, "model": {"chat_template": "plain"}},
)

# Run inference against it
results = run_inference(
    model_path=None,
    vllm_server_url=job["vllm_server_url"],
    data_path=f"{OUT}/rows.jsonl",
    output_path=f"{OUT}/results.jsonl",
    game_class=EchoGame,
)
print("results", len(results), results[0].to_dict()["reward"])
print(inference_scheduler.complete_job(job["job_id"])["status"])
