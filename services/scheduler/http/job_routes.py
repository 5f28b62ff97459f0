"""The routes of jobs, but for what they leave behind: to submit and end them, to use them, to know about them."""

from __future__ import annotations

from opentinker.services.scheduler.http.inference import InferenceApi
from opentinker.services.scheduler.http.jobs import MOST_FAILURES, MOST_JOBS, STATES, JobsApi
from opentinker.services.scheduler.http.observability import MOST_LINES, KnowingApi
from opentinker.services.scheduler.http.openapi import Parameter, Route
from opentinker.services.scheduler.http.stream_credentials import StreamsApi
from opentinker.shared import api_types
from opentinker.shared.security.authorization import Action
from opentinker.shared.spec import JobSpec
from opentinker.shared.types.telemetry import LEVELS

KEY = Parameter(
    "Idempotency-Key", "header", "Any text of up to 200 characters: the same key and spec make one job, for 24 h."
)
BEFORE_JOB = Parameter("before", "query", "Only jobs made before this one: the cursor of the last answer.")
LIMIT_JOBS = Parameter("limit", "query", f"Jobs per answer, up to {MOST_JOBS}.", "integer")
STATE_JOBS = Parameter("state", "query", f"Only jobs that are: one of {', '.join(STATES)}.")
SEARCH_JOBS = Parameter(
    "search", "query", "Only jobs with all of these words in their id, name, kind, model, environment or key's id."
)
LIMIT_FAILURES = Parameter("limit", "query", f"At most this many, the newest; up to {MOST_FAILURES}.", "integer")
AFTER_EVENT = Parameter("after", "query", "Only events after this id; `Last-Event-ID` means the same.")
FORMAT = Parameter("format", "query", "`json`: what there is now as one list, instead of a stream.")
AFTER_POINT = Parameter("after", "query", "Only points after this cursor.", "integer")
AFTER_PART = Parameter("after", "query", "Only parts after this cursor.", "integer")
LAST_S = Parameter("last_s", "query", "Only those of the last so many seconds.", "integer")
LIMIT = Parameter("limit", "query", "Points, lines, or parts per answer.", "integer")
SOURCE = Parameter("source", "query", "Only points of this source, e.g. `trainer`.")
NAMES = Parameter("names", "query", "Only these values, comma separated.")
STEP = Parameter("step", "query", "Of this evaluation; default: the newest.", "integer")
TRAINED = Parameter("step", "query", "That trained on it; default: the newest.", "integer")
AFTER_STEP = Parameter("after", "query", "Only steps after this one.", "integer")
STEPS = Parameter("limit", "query", "This many steps, the newest; default: 1.", "integer")
AFTER_LINE = Parameter("after", "query", "Only lines after this cursor; `Last-Event-ID` means the same.", "integer")
LEVEL = Parameter("level", "query", f"Lines of this level and above: one of {', '.join(LEVELS)}.")
LAST = Parameter("last", "query", f"Only the last so many of the lines that there are, up to {MOST_LINES}.", "integer")


def job_routes(jobs: JobsApi, inference: InferenceApi) -> list[Route]:
    get = "/v1/jobs/{id}"
    openai = get + "/v1"
    json = "application/json"
    knowing = KnowingApi(jobs)
    return [
        Route(
            "POST",
            "/v1/jobs",
            jobs.create,
            Action.JOBS_WRITE,
            "Submit a job",
            201,
            (KEY,),
            body=JobSpec,
            answer=api_types.JobSummary,
        ),
        Route(
            "GET",
            "/v1/jobs",
            jobs.list,
            Action.JOBS_READ,
            "Your jobs, newest first",
            200,
            (BEFORE_JOB, LIMIT_JOBS, STATE_JOBS, SEARCH_JOBS),
            answer=api_types.Jobs,
        ),
        Route(
            "GET",
            get,
            jobs.get,
            Action.JOBS_READ,
            "One job: state, ledger, workers, last metrics",
            answer=api_types.Job,
        ),
        Route(
            "POST",
            get + "/cancel",
            jobs.cancel,
            Action.JOBS_WRITE,
            "Cancel a job in any state",
            answer=api_types.JobSummary,
        ),
        Route(
            "POST",
            get + "/pause",
            jobs.pause,
            Action.JOBS_WRITE,
            "Save what it has trained and free its workers",
            answer=api_types.JobSummary,
        ),
        Route(
            "POST",
            get + "/resume",
            jobs.resume,
            Action.JOBS_WRITE,
            "Queue a paused job again; it goes on from its checkpoint",
            answer=api_types.JobSummary,
        ),
        Route(
            "POST",
            get + "/complete",
            jobs.complete,
            Action.JOBS_WRITE,
            "End an inference job: it has succeeded",
            answer=api_types.JobSummary,
        ),
        Route(
            "GET",
            openai + "/models",
            inference.models,
            Action.INFERENCE_USE,
            "OpenAI: what an inference job serves",
        ),
        Route(
            "GET",
            openai + "/models/{model}",
            inference.model,
            Action.INFERENCE_USE,
            "OpenAI: one of the models, by any of its names",
            slashes="model",
        ),
        Route(
            "POST",
            openai + "/chat/completions",
            inference.chat,
            Action.INFERENCE_USE,
            "OpenAI: chat, streamed or not",
            takes=json,
        ),
        Route(
            "POST",
            openai + "/completions",
            inference.completions,
            Action.INFERENCE_USE,
            "OpenAI: text or token ids",
            takes=json,
        ),
        Route(
            "GET",
            get + "/events",
            jobs.events,
            Action.JOBS_READ,
            "The job's log, as server-sent events",
            200,
            (AFTER_EVENT, FORMAT),
            answer=api_types.Events,
        ),
        Route(
            "GET",
            get + "/metrics",
            jobs.metrics,
            Action.JOBS_READ,
            "Metrics history",
            200,
            (AFTER_POINT, LIMIT, SOURCE, NAMES),
            answer=api_types.Metrics,
        ),
        Route(
            "GET",
            get + "/transcripts",
            jobs.transcripts,
            Action.JOBS_READ,
            "Kept validation episodes",
            200,
            (STEP,),
            answer=api_types.Transcripts,
        ),
        Route(
            "POST",
            get + "/stream-credentials",
            StreamsApi(jobs).give,
            Action.JOBS_READ,
            "A token to hear the job live on NATS, for a while; shows it, once",
            201,
            answer=api_types.StreamCredentials,
        ),
        Route(
            "GET",
            get + "/logs",
            knowing.logs,
            Action.JOBS_READ,
            "What all services said about the job",
            200,
            (AFTER_LINE, LEVEL, LAST, LIMIT, FORMAT),
            answer=api_types.LogLines,
        ),
        Route(
            "GET",
            get + "/rollouts",
            knowing.rollouts,
            Action.JOBS_READ,
            "Kept training episodes",
            200,
            (TRAINED,),
            answer=api_types.Rollouts,
        ),
        Route(
            "GET",
            get + "/distributions",
            knowing.distributions,
            Action.JOBS_READ,
            "How a step's rewards, lengths, turns, staleness and importance ratios are spread",
            200,
            (TRAINED, AFTER_STEP, STEPS),
            answer=api_types.Distributions,
        ),
        Route(
            "GET",
            get + "/timeline",
            knowing.timeline,
            Action.JOBS_READ,
            "What its workers were busy with, second by second",
            200,
            (AFTER_PART, LAST_S, LIMIT),
            answer=api_types.Timeline,
        ),
        Route(
            "GET",
            get + "/failures",
            jobs.failures,
            Action.JOBS_READ,
            "Groups that failed for good",
            200,
            (LIMIT_FAILURES,),
            answer=api_types.Failures,
        ),
    ]
