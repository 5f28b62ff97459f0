"""Tracing helpers of the published package. Episodes of evaluations are kept with the job here."""

from opentinker.unsupported import refused

INSTEAD = "episodes are kept by the service: [validation] transcripts of the job, and `opentinker transcripts JOB`"

RolloutTrace = refused("RolloutTrace", INSTEAD)
RolloutTraceSaver = refused("RolloutTraceSaver", INSTEAD)
init_weave_tracing = refused("init_weave_tracing", f"nothing is sent to third parties; {INSTEAD}")
init_mlflow_tracing = refused("init_mlflow_tracing", f"nothing is sent to third parties; {INSTEAD}")
get_global_saver = refused("get_global_saver", INSTEAD)
set_global_saver = refused("set_global_saver", INSTEAD)
init_global_saver = refused("init_global_saver", INSTEAD)

__all__ = [
    "RolloutTrace",
    "RolloutTraceSaver",
    "get_global_saver",
    "init_global_saver",
    "init_mlflow_tracing",
    "init_weave_tracing",
    "set_global_saver",
]
