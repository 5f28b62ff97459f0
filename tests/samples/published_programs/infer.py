"""Inference: a job that serves a model, and the game played by it.

python infer.py URL MODEL
"""

import sys

from number_game import NumberGame  # type: ignore[import-not-found]

from opentinker.client.utils.http_training_client import InferenceSchedulerClient
from opentinker.environment.inference_pipeline import run_inference

URL, MODEL = sys.argv[1:]

# Submit an inference job
inference_scheduler = InferenceSchedulerClient(url=URL)
job = inference_scheduler.submit_inference_job(model_path=MODEL, tensor_parallel_size=1, num_gpus=1)

# Run inference against it
results = run_inference(
    model_path=None,
    vllm_server_url=job["vllm_server_url"],
    data_path="rows.jsonl",
    output_path="results.jsonl",
    max_tokens=8,
    game_class=NumberGame,
)
print("results", len(results), results[0].to_dict()["ground_truth"])
print(inference_scheduler.complete_job(job["job_id"])["status"])
