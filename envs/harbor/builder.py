"""Builds a task's image once: Docker does, or the instructions of its Dockerfile run in a sandbox, and what they write
is the layer.

Without Docker there is no network, in a build as in an episode: programs that a task needs are in its root file system,
or in the task's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from opentinker.envs.harbor.box import SHARED, BoxError, BoxLost
from opentinker.envs.harbor.docker import DockerRuntime
from opentinker.envs.harbor.dockerfile import Dockerfile, Instruction
from opentinker.envs.harbor.image import FILE, LAYERS, Shell, TaskImage, key_of
from opentinker.envs.harbor.overlays import OverlayRuntime, OverlayWorkspace
from opentinker.envs.harbor.roots import give, made_once, root_of
from opentinker.envs.harbor.task import ENVIRONMENT, Task
from opentinker.envs.harbor.workspace import Runtime
from opentinker.shared.types import codec
from opentinker.shared.types.errors import SpecError

CONTEXT = "context"
SHOWN = 1500
"""Characters of a failed command's output."""


async def build(runtime: Runtime, task: Task) -> tuple[TaskImage, bool]:
    """Return the task's image, and whether it was built now. Raises SpecError if an instruction fails, Unavailable,
    OSError."""
    if isinstance(runtime, DockerRuntime):
        return await runtime.build(task)
    assert isinstance(runtime, OverlayRuntime) and task.dockerfile is not None
    uid, machine = runtime.sandbox.root_uid, task.config.environment
    root = await asyncio.to_thread(root_of, task.dockerfile.image, runtime.home, runtime.settings.harbor_roots, uid)
    copies = any(step.kind == "copy" for step in task.dockerfile.steps)
    key = key_of(task.dockerfile, root, task.environment_digest if copies else "", machine.env)
    with contextlib.suppress(OSError):
        return await asyncio.to_thread(TaskImage.load, runtime.home, key), False
    bare = TaskImage(key="", places=root, shell=Shell(variables={**Shell().variables, **machine.env}))
    workspace = await asyncio.to_thread(runtime.make, bare, machine)
    try:
        async with asyncio.timeout(machine.build_timeout_sec):
            shell = await _play(workspace, task, task.dockerfile)
        await workspace.stop()
        image = TaskImage(key=key, places={place: [*lowers, f"{LAYERS}/{key}/{number}"] for number, (place, lowers)
                                       in enumerate(root.items())}, shell=shell)  # fmt: skip
        await asyncio.to_thread(_keep, runtime, workspace, image)
    except TimeoutError:
        raise _failed(task, 0, f"took longer than build_timeout_sec = {machine.build_timeout_sec:g}") from None
    finally:
        await workspace.close()
    return image, True


async def _play(workspace: OverlayWorkspace, task: Task, dockerfile: Dockerfile) -> Shell:
    """Run the instructions. Return the state that the task's shells begin with."""
    cwd, variables = "/", dict(workspace.shell.variables)
    context = task.folder / ENVIRONMENT
    await workspace.restart({CONTEXT: context} if context.is_dir() else {})
    for step in dockerfile.steps:
        try:
            if step.kind == "env":
                variables |= step.variables
            elif step.kind == "workdir":
                cwd = step.target
                await workspace.ask("make", path=cwd)
            elif step.kind == "copy":
                await _copy(workspace, step)
            else:
                await _run(workspace, task, step, Shell(cwd, variables))
        except (BoxLost, BoxError) as error:
            raise _failed(task, step.line, str(error)) from None
    return Shell(cwd, {**variables, **task.config.environment.env})


async def _copy(workspace: OverlayWorkspace, step: Instruction) -> None:
    await workspace.ask(
        "copy", base=f"{SHARED}/{CONTEXT}", sources=step.sources, target=step.target, directory=step.directory
    )


async def _run(workspace: OverlayWorkspace, task: Task, step: Instruction, shell: Shell) -> None:
    answer = await workspace.run(step.command, task.config.environment.build_timeout_sec, shell)
    if answer.status:
        said = answer.output.strip()[-SHOWN:]
        raise _failed(task, step.line, f"RUN ended with status {answer.status} (there is no network): {said}")


def _failed(task: Task, line: int, problem: str) -> SpecError:
    field = f"{task.name}/environment/Dockerfile{f':{line}' if line else ''}"
    return SpecError.of(field, None, problem)


def _keep(runtime: OverlayRuntime, workspace: OverlayWorkspace, image: TaskImage) -> None:
    """Make the layer of what a build wrote."""
    with made_once(runtime.home / LAYERS / image.key) as work:
        for number in range(len(image.places)):
            os.rename(workspace.layer(number), work / str(number))
        (work / FILE).write_bytes(codec.to_json(image))
        give(work, runtime.sandbox.root_uid)
