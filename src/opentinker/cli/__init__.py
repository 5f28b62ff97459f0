"""`opentinker`: the command line. Commands import what they need when they run, so that `--help` answers immediately.

A user's mistake ends in one clear message and exit status 1 or 2, never in a traceback. With --json the message is an
object on stdout.
"""

from __future__ import annotations

import sys

import typer

from opentinker.cli import (
    artifacts,
    chat,
    environments,
    help_format,
    init_job,
    job_list,
    job_record,
    jobs,
    keys,
    logs,
    models,
    observability,
    rows,
    run,
    script,
    sink,
    specs,
    sweeps,
)
from opentinker.cli.machine import commands, status
from opentinker.cli.planning import plan, validate
from opentinker.cli.results import comparison, metrics
from opentinker.cli.shell import completion
from opentinker.shared.types.errors import OpenTinkerError

app = typer.Typer(
    name="opentinker",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback(cls=help_format.CommandGroup)(help_format.root)
for command in (
    *(commands.up, commands.down, commands.doctor, commands.access, status.status, status.free),
    *(jobs.submit, jobs.watch, jobs.pause, jobs.resume, jobs.failures, jobs.events, jobs.transcripts, logs.logs),
    *(job_list.jobs, job_list.label, job_list.cancel, job_record.job, sweeps.sweep, sweeps.sweeps),
    *(plan.plan, validate.validate, run.run),
    *(artifacts.checkpoints, artifacts.download, artifacts.artifacts, artifacts.delete, artifacts.publish),
    *(
        artifacts.unpublish,
        artifacts.published,
        rows.rows,
        models.models,
        metrics.metrics,
        comparison.compare,
        sink.sink,
        chat.chat,
    ),
    *(observability.rollouts, observability.distributions, observability.usage, observability.why),
    *(keys.whoami, keys.webhook_secret, keys.share, completion.completion),
):
    app.command()(command)
app.command("eval")(jobs.evaluate)
app.command("init")(init_job.init)
app.command("spec")(specs.show_spec)
app.command("algorithms")(specs.show_algorithms)
app.command("help")(help_format.help_)
app.command(context_settings=script.PASSED_ON, options_metavar="")(script.script)
app.add_typer(environments.env)
app.add_typer(keys.keys, name="keys")
app.add_typer(commands.audit, name="audit")
help_format.present(app)


def main() -> None:
    command = typer.main.get_command(app)
    help_format.name_values(command)
    try:
        command()
    except OpenTinkerError as error:
        help_format.fail(error)
    except BrokenPipeError:  # `opentinker events JOB | head`
        sys.stderr.close()
        sys.exit(0)
