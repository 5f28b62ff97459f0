"""Every name of the published package: it is there, has the published arguments, and works or says what to do."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import opentinker.environment as published
from tests.support.cluster import PYTHONPATH, ROOT

HOSTS = "game_class, host=0.0.0.0, port=8081, stats_class=None, **game_kwargs"
ROWS = "game_class, config, data_paths, val_data_paths=None, game_kwargs=None, job_id=None"
SCHEDULER = "scheduler_url=None, api_key=None, timeout=600.0, poll_interval=2.0"
PROGRAMS = "sandbox_url=None, max_turns=10, timeout=30.0, backend=monty"
MATH = "max_retries=0, answer_pattern=None"
GOMOKU = (
    "board_size=9, win_length=5, max_total_steps=None, max_initial_moves=None, empty_board_prob=None, random_moves=None"
)
ALFWORLD = "config_path=None, max_steps=20, task_types=None, split=train, num_games=-1, use_shared_env=False"
SIGNATURES = {
    "environment.base_game:StepResult": "observation, reward, done, info=*",
    "environment.base_game:AbstractGame": "",
    "environment.base_game:GameDataGenerator": "game_class, game_kwargs=None, seed=None",
    "environment.environment:RewardFunctionSpec": "type, config_path=None, config_name=None, config_kwargs=*, "
    "remote_endpoint=None, remote_api_key=None, code_function=None, code_source=None",
    "environment.environment:BaseEnvironment": "",
    "environment.base_game_environment:InteractionSpec": "name, class_path, config=*",
    "environment.base_game_environment:GameEnvironment": "game_class, config, game_kwargs=None, reward_function=None, "
    "job_id=None",
    "environment.base_game_environment:create_game_environment": "game_class, config, **game_kwargs",
    "environment.base_data_generator:AbstractGameDataGenerator": "",
    "environment.base_data_generator:DynamicGameDataset": "data_generator, tokenizer=None, config=None, "
    "processor=None, virtual_size=1000, seed=None",
    "environment.base_data_generator:collate_fn": "rows",
    "environment.static_data_generator:StaticDatasetGenerator": "data_paths, interaction_name=math, prompt_key=prompt, "
    "ground_truth_key=ground_truth, data_source_key=data_source, extra_keys=None, shuffle=True, seed=None, "
    "cache_dir=None, system_prompt=None",
    "environment.base_game_server:BaseGameStats": "",
    "environment.base_game_server:GameStats": "",
    "environment.base_game_server:create_game_app": "game_class, stats_class=None, **game_kwargs",
    "environment.base_game_server:create_game_server": "game_class, stats_class=None, **game_kwargs",
    "environment.base_game_server:run_game_server": HOSTS,
    "environment.game_stats:BaseGameStats": "",
    "environment.game_stats:GameStats": "",
    "environment.game_stats_client:GameStatsClient": "game_server_url, job_id=default, timeout=5.0",
    "environment.math:MathGame": MATH,
    "environment.math:CodeInterpreterMathGame": PROGRAMS,
    "environment.math.math_game:MathGame": MATH,
    "environment.math.math_env:MathGameEnvironment": ROWS,
    "environment.math.math_tool_game:CodeInterpreterMathGame": PROGRAMS,
    "environment.math.math_tool_env:MathCodeInterpreterEnvironment": ROWS,
    "environment.gomoku:GomokuGame": GOMOKU,
    "environment.gomoku.gomoku_game:GomokuGame": GOMOKU,
    "environment.gomoku:GomokuGameStats": "",
    "environment.gomoku.gomoku_stats:GomokuGameStats": "",
    "environment.alfworld:ALFWorldGame": ALFWORLD,
    "environment.alfworld.alfworld_game:ALFWorldGame": ALFWORLD,
    "environment.android_world:AndroidWorldGame": f"{ALFWORLD}, emulator_console_port=None, emulator_grpc_port=None",
    "environment.vl_game_environment:VLGameEnvironment": f"{ROWS}, image_key=images",
    "environment.geo3k:Geo3KGame": MATH,
    "environment.geo3k.geo3k_game:Geo3KGame": MATH,
    "environment.geo3k:Geo3KToolGame": "max_retries=3",
    "environment.geo3k.geo3k_tool_game:Geo3KToolGame": "max_retries=3",
    "environment.geo3k:Geo3KGameEnvironment": "config, data_paths, val_data_paths=None, job_id=None",
    "environment.geo3k:Geo3KToolEnvironment": "config, data_paths, val_data_paths=None, job_id=None, max_retries=3",
    "environment.inference_pipeline:load_samples": "data_path, max_samples=None, **options",
    "environment.inference_pipeline:generate_samples": "game_class, num_samples=50, seed=42, **game_kwargs",
    "environment.gym_environment_interaction:GymEnvironmentInteraction": "config",
    "environment.gym_environment_interaction:SimpleTextEnvironmentInteraction": "config",
    "client.utils.http_training_client:SchedulerClient": f"{SCHEDULER}, url=None",
    "client.utils.http_training_client:SchedulerClient.submit_job": "self, config, enable_agent_loop=True, "
    "wandb_key=None, num_gpus=None",
    "client.utils.http_training_client:SchedulerClient.cancel_job": "self, job_id",
    "client.utils.http_training_client:SchedulerClient.complete_job": "self, job_id",
    "client.utils.http_training_client:ServiceClient": "server_url, project_name=None, experiment_name=None, "
    "logger_backends=None, **client_kwargs",
    "client.utils.http_training_client:ServiceClient.set_config": "self, args, env",
    "client.utils.http_training_client:ServiceClient.fit": "self, env, num_epochs=None, num_steps=None, save_freq=100, "
    "test_freq=50, validate_before_training=True, verbose=True, game_stats_client=None, game_stats_log_freq=1",
    "client.utils.http_training_client:InferenceSchedulerClient": f"{SCHEDULER}, url=None",
    "client.utils.http_training_client:InferenceSchedulerClient.submit_inference_job": "self, model_path, "
    "tokenizer_path=None, tensor_parallel_size=1, num_gpus=None, gpu_memory_utilization=0.9, max_model_len=None, "
    "trust_remote_code=True, opentinker=None",
    "client.utils.http_training_client:InferenceSchedulerClient.get_job_status": "self, job_id",
    "client.utils.http_training_client:InferenceSchedulerClient.cancel_job": "self, job_id",
    "client.utils.http_training_client:InferenceSchedulerClient.complete_job": "self, job_id",
    "environment.inference_pipeline:run_inference": "model_path=None, data_path=None, game_class=None, "
    "env_endpoint=None, job_id=default, vllm_server_url=None, tokenizer_path=None, output_path=None, temperature=0.0, "
    "top_p=1.0, max_tokens=4096, max_tokens_per_turn=None, max_samples=None, max_user_turns=0, max_assistant_turns=1, "
    "max_context_length=30000, tensor_parallel_size=1, concurrency=64, **game_kwargs",
    "environment.inference_pipeline:RemoteEnvironmentClient": "env_endpoint, job_id=default, timeout=60.0",
    "environment.inference_pipeline:InferencePipeline": "model_path=None, tokenizer_path=None, vllm_server_url=None, "
    "env_endpoint=None, job_id=default, max_user_turns=0, max_assistant_turns=1, max_context_length=30000, "
    "tensor_parallel_size=1, gpu_memory_utilization=0.9, trust_remote_code=True, game_class=None, temperature=0.0, "
    "top_p=1.0, max_tokens=4096, max_tokens_per_turn=None, concurrency=64, **game_kwargs",
    "environment.inference_pipeline:InferencePipeline.run_single_inference": "self, messages, env_kwargs, "
    "temperature=0.0, top_p=1.0, max_tokens=4096, max_tokens_per_turn=None",
    "environment.inference_pipeline:InferenceResult": "sample_id, messages, prompt_text, response_text, reward, done, "
    "num_turns, ground_truth=None, info=*",
    "client.utils.utils:resolve_path": "path, original_cwd=None",
    "client.utils.utils:resolve_paths_in_config": "config, original_cwd=None",
    "client.utils.utils:verify_raw_prompt_format": "rows",
    "client.utils.utils:math_reward_function": "data_source, solution_str, ground_truth, extra_info=None",
    "client.utils.utils:find_free_port": "",
    "client.utils.utils:tolerant_merge_dicts": "first, second",
    "client.utils.scheduler_client_lifecycle:get_lifecycle_manager": "",
}
"""`*`: a default of its own per call."""
METHODS = {
    "environment.base_game:AbstractGame": "reset step get_system_prompt get_initial_user_message "
    "generate_initial_state render_state_for_prompt get_user_message_with_state get_state "
    "get_interaction_name parse_action close",
    "environment.environment:BaseEnvironment": "setup get_dataloader get_config",
    "environment.environment:RewardFunctionSpec": "to_config_dict",
    "environment.base_game_environment:GameEnvironment": "get_dataloader get_interaction_config_path "
    "get_interaction_config_content get_config setup cleanup _setup_dataloader",
    "environment.base_data_generator:AbstractGameDataGenerator": "generate_sample get_interaction_name",
    "environment.base_game_server:BaseGameStats": "record_game_result register_game_start get_step_stats "
    "get_cumulative_stats reset_step_stats reset_all",
    "environment.game_stats_client:GameStatsClient": "reset_step get_step_stats get_all_stats get_cumulative_stats "
    "reset_all list_jobs health_check",
    "environment.gym_environment_interaction:GymEnvironmentInteraction": "start_interaction generate_response "
    "calculate_score finalize_interaction",
    "environment.inference_pipeline:InferenceResult": "to_dict",
    "environment.inference_pipeline:RemoteEnvironmentClient": "reset step health_check",
    "client.utils.scheduler_client_lifecycle:LifecycleManager": "register_job add_cleanup_callback start_reward_server "
    "enable_auto_cleanup",
}
CONSTANTS = {
    "environment.math:MathGame": "REWARD_CORRECT REWARD_INCORRECT REWARD_FORMAT_ERROR",
    "environment.math:CodeInterpreterMathGame": "REWARD_CORRECT REWARD_INCORRECT",
    "environment.geo3k:Geo3KGame": "REWARD_CORRECT REWARD_INCORRECT",
    "environment.geo3k:Geo3KToolGame": "REWARD_CORRECT REWARD_INCORRECT PENALTY_NO_IMPROVEMENT",
    "environment.gomoku:GomokuGame": "REWARD_WIN REWARD_LOSS REWARD_DRAW REWARD_VALID_MOVE REWARD_INVALID_FORMAT "
    "REWARD_INVALID_POSITION REWARD_INVALID_GAME_OVER REWARD_TIMEOUT DEFAULT_MAX_TOTAL_STEPS",
    "environment.alfworld:ALFWorldGame": "REWARD_SUCCESS REWARD_FAILURE REWARD_STEP REWARD_INVALID_ACTION "
    "DEFAULT_MAX_STEPS ALL_TASK_TYPES",
    "environment.android_world:AndroidWorldGame": "REWARD_SUCCESS REWARD_FAILURE REWARD_STEP REWARD_INVALID_ACTION "
    "DEFAULT_MAX_STEPS ALL_TASK_TYPES",
}
REFUSED = {
    "client.utils.http_training_client:HTTPTrainingClient": "ServiceClient",
    "client.utils.http_training_client:ServiceClient.upload_reward_function": "step()",
    "client.utils.utils:serialize_dataproto": "fit",
    "client.utils.utils:deserialize_dataproto": "fit",
    "client.utils.utils:prepare_dataset": "data_paths",
    "client.utils.scheduler_client_lifecycle:LifecycleManager.start_reward_server": "step()",
    "server.sandbox:start_sandbox_server": "environment.tools",
    "server.sandbox:create_tool_config": "environment.tools",
    "utils:RolloutTraceSaver": "transcripts",
    "utils:RolloutTrace": "transcripts",
    "utils:init_weave_tracing": "third parties",
    "utils:init_mlflow_tracing": "third parties",
    "utils:get_global_saver": "transcripts",
    "utils:set_global_saver": "transcripts",
    "utils:init_global_saver": "transcripts",
}
"""Imports; when it is called, it says what to do instead."""
SERVERS = ("math.math_server", "math.math_tool_server", "gomoku.gomoku_server", "geo3k.geo3k_server")


def found(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = import_module(f"opentinker.{module}")
    for part in name.split("."):
        value = getattr(value, part)
    return value


def written(function: Any) -> str:
    """Its arguments, without types."""
    words = []
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        fresh = repr(default) == "<factory>"
        end = "" if default is parameter.empty else f"={'*' if fresh else default}"
        words.append(("**" if parameter.kind is parameter.VAR_KEYWORD else "") + name + end)
    return ", ".join(words)


@pytest.mark.parametrize("path", SIGNATURES)
def test_a_published_name_has_its_arguments(path: str) -> None:
    assert written(found(path)) == SIGNATURES[path]


@pytest.mark.parametrize("path", METHODS)
def test_a_published_class_has_its_methods(path: str) -> None:
    assert [name for name in METHODS[path].split() if not callable(getattr(found(path), name, None))] == []


@pytest.mark.parametrize("path", CONSTANTS)
def test_a_published_game_has_its_constants(path: str) -> None:
    assert [name for name in CONSTANTS[path].split() if not hasattr(found(path), name)] == []


@pytest.mark.parametrize("path", REFUSED)
def test_what_means_nothing_here_says_what_to_do(path: str) -> None:
    with pytest.raises(NotImplementedError, match=path.rpartition(":")[2].rpartition(".")[2]) as refused:
        found(path)(None)
    assert REFUSED[path] in str(refused.value)


def test_the_package_gives_all_that_it_lists() -> None:
    for name, module in published._HOME.items():
        assert getattr(published, name) is getattr(import_module(f"opentinker.environment.{module}"), name)


def test_scripts_beside_utils_find_the_same_modules(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import utils.http_training_client as a, utils.utils as b, utils.scheduler_client_lifecycle as c\n"
        "import opentinker.client.utils.utils as same\n"
        "print(a.ServiceClient.__name__, b.resolve_path('x') == same.resolve_path('x'), c.get_lifecycle_manager())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "opentinker.client", str(script)],
        capture_output=True, text=True, check=False, cwd=ROOT, env={"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert done.stdout.startswith("ServiceClient True"), done.stderr


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_of_a_game_is_a_program_with_options(name: str) -> None:
    from opentinker.environment.base_game_server import options_of

    module = import_module(f"opentinker.environment.{name}")
    (game,) = (kind for title, kind in vars(module).items() if title.endswith("Game"))
    assert "--port" in options_of(game, 8088).format_help()


def test_options_of_a_server_are_spelled_with_dashes_or_underscores() -> None:
    from opentinker.environment.alfworld import ALFWorldGame
    from opentinker.environment.base_game_server import options_of

    for spelled in (
        "--max_steps 7 --num_games 5 --config_path a.yaml",
        "--max-steps 7 --num-games 5 --config-path a.yaml",
    ):
        given = options_of(ALFWorldGame, 8082).parse_args([*spelled.split(), "--split", "train", "--shards", "4"])
        assert (given.max_steps, given.num_games, given.config_path, given.shards) == (7, 5, "a.yaml", 4)
