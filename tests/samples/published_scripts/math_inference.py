"""Inference by a job of the service, which nothing here ends but the end of the program."""

from pathlib import Path

from omegaconf import OmegaConf
from utils.http_training_client import InferenceSchedulerClient  # type: ignore[import-not-found]
from utils.scheduler_client_lifecycle import get_lifecycle_manager  # type: ignore[import-not-found]

from opentinker.environment.inference_pipeline import run_inference
from opentinker.environment.math import MathGame


def main() -> None:
    config = Path(__file__).parent / "client_config" / "math_inference_config.yaml"
    args = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_cli())
    lifecycle = get_lifecycle_manager()
    scheduler = InferenceSchedulerClient(scheduler_url=args.scheduler_url, api_key=args.get("scheduler_api_key"))
    job = scheduler.submit_inference_job(
        model_path=args.model_path,
        tokenizer_path=args.get("tokenizer_path"),
        tensor_parallel_size=args.get("tensor_parallel_size", 1),
        num_gpus=args.get("num_gpus"),
        gpu_memory_utilization=args.get("gpu_memory_utilization", 0.9),
        max_model_len=args.get("max_model_len"),
        trust_remote_code=args.get("trust_remote_code", True),
        opentinker=OmegaConf.to_container(args.opentinker),
    )
    lifecycle.register_job(scheduler, job["job_id"])
    results = run_inference(
        model_path=None,
        vllm_server_url=job["vllm_server_url"],
        tokenizer_path=args.get("tokenizer_path") or args.model_path,
        data_path=args.data_path,
        game_class=MathGame,
        env_endpoint=args.env_endpoint,
        job_id=job["job_id"],
        output_path=args.get("output_path"),
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_new_tokens,
        max_samples=args.get("max_samples"),
        max_user_turns=args.multi_turn.max_user_turns,
        max_assistant_turns=args.multi_turn.max_assistant_turns,
    )
    print("results", len(results))


if __name__ == "__main__":
    main()
