"""Serves one phone by HTTP, where the library `android_world` and an emulator are: the routes of AndroidWorld's own
server, and `GET /state`, which tells the elements of the screen and gives a small PNG.

    python android_server.py --console-port 5554 --grpc-port 8554 --port 5001

Needs nothing but `android_world` and the standard library, so this file may be copied to the phone's machine. One
server has one emulator; a second emulator has a second server.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import inspect
import json
import struct
import threading
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

BODY_BYTES = 1 << 20
SEED, COMBINATIONS, FAMILY = 42, 2, "android_world"
TRUE = ("true", "1", "yes")
Answer = dict[str, Any]
DONE: Answer = {"status": "success", "message": ""}


class WrongRequest(Exception):
    """The request is not one that this server answers; `status` says how."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class PhoneDevice:
    """The emulator, the tasks that were drawn for it, and what each route does with them."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._suite: dict[str, list[Any]] = {}
        self.reinitialize()

    # --- the phone --------------------------------------------------------------------------------------------------

    def reset(self, go_home: bool) -> None:
        self._env.reset(go_home=go_home)

    def screenshot(self, wait_to_stabilize: bool) -> Answer:
        return {"pixels": self._env.get_state(wait_to_stabilize=wait_to_stabilize).pixels.tolist()}

    def state(self, wait_to_stabilize: bool, picture: bool = False, max_side: int = 4096) -> Answer:
        state = self._env.get_state(wait_to_stabilize=wait_to_stabilize)
        height, width = state.pixels.shape[:2]
        elements = [dataclasses.asdict(element) for element in state.ui_elements]
        shown = base64.b64encode(_png(_smaller(state.pixels, max_side))).decode() if picture else ""
        return {"width": width, "height": height, "ui_elements": elements, "picture": shown}

    def execute_action(self, action: Answer) -> None:
        from android_world.env import json_action

        try:
            made = json_action.JSONAction(**action)
        except (TypeError, ValueError) as error:
            raise WrongRequest(422, str(error)) from None
        self._env.execute_action(made)

    def close(self) -> None:
        self._env.close()

    def health(self) -> None:
        """Answers at all."""

    # --- tasks ------------------------------------------------------------------------------------------------------

    def reinitialize(
        self, n_task_combinations: int = COMBINATIONS, seed: int = SEED, task_family: str = FAMILY
    ) -> None:
        from android_world import registry, suite_utils

        try:
            found = registry.TaskRegistry().get_registry(task_family)
        except ValueError as error:
            raise WrongRequest(400, str(error)) from None
        self._suite = suite_utils.create_suite(found, n_task_combinations=n_task_combinations, seed=seed)

    def task_list(self, max_index: int) -> Answer:
        names = list(self._suite)
        return {"task_list": names[:max_index] if 0 <= max_index <= len(names) else names}

    def task_length(self, task_type: str) -> Answer:
        return {"length": len(self._tasks(task_type))}

    def initialize(self, task_type: str, task_idx: int) -> None:
        self._task(task_type, task_idx).initialize_task(self._env)

    def tear_down(self, task_type: str, task_idx: int) -> None:
        self._task(task_type, task_idx).tear_down(self._env)

    def score(self, task_type: str, task_idx: int) -> Answer:
        return {"score": float(self._task(task_type, task_idx).is_successful(self._env))}

    def goal(self, task_type: str, task_idx: int) -> Answer:
        return {"goal": self._task(task_type, task_idx).goal}

    def template(self, task_type: str, task_idx: int) -> Answer:
        return {"template": self._task(task_type, task_idx).template}

    def _tasks(self, name: str) -> list[Any]:
        if name not in self._suite:
            raise WrongRequest(404, f"there is no task {name!r:.100}")
        return self._suite[name]

    def _task(self, name: str, number: int) -> Any:
        tasks = self._tasks(name)
        if not 0 <= number < len(tasks):
            raise WrongRequest(404, f"{name} has the numbers 0 to {len(tasks) - 1}")
        return tasks[number]


ROUTES: dict[tuple[str, str], Callable[..., Answer | None]] = {
    ("POST", "/reset"): PhoneDevice.reset,
    ("GET", "/screenshot"): PhoneDevice.screenshot,
    ("GET", "/state"): PhoneDevice.state,
    ("POST", "/execute_action"): PhoneDevice.execute_action,
    ("POST", "/close"): PhoneDevice.close,
    ("GET", "/health"): PhoneDevice.health,
    ("GET", "/suite/reinitialize"): PhoneDevice.reinitialize,
    ("GET", "/suite/task_list"): PhoneDevice.task_list,
    ("GET", "/suite/task_length"): PhoneDevice.task_length,
    ("POST", "/task/initialize"): PhoneDevice.initialize,
    ("POST", "/task/tear_down"): PhoneDevice.tear_down,
    ("GET", "/task/score"): PhoneDevice.score,
    ("GET", "/task/goal"): PhoneDevice.goal,
    ("GET", "/task/template"): PhoneDevice.template,
}


class PhoneHandler(BaseHTTPRequestHandler):
    """One request. Requests wait for each other, because the phone does one thing at a time."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    """Bytes of an answer that are sent together: with headers alone first, each answer would wait for 40 ms."""
    server: PhoneHttpServer

    def do_GET(self) -> None:
        try:
            status, answer = 200, self._answer()
        except WrongRequest as error:
            status, answer = error.status, {"detail": str(error)}
        except Exception as error:  # noqa: BLE001 - the library's and the emulator's: the client gets it as the answer
            status, answer = 500, {"detail": f"{type(error).__name__}: {error}"}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def _answer(self) -> Answer:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= BODY_BYTES:
            raise WrongRequest(413, f"a body has at most {BODY_BYTES:,} bytes")
        body = self.rfile.read(length)
        if (self.command, parts.path) == ("GET", "/openapi.json"):
            return {"paths": {path: {} for _, path in self.server.routes}}
        route = self.server.routes.get((self.command, parts.path))
        if route is None:
            raise WrongRequest(404, f"there is no {self.command} {parts.path:.200}")
        if route is PhoneDevice.execute_action:
            given: Answer = {"action": _object(body)}
        else:
            given = _parameters(route, dict(parse_qsl(parts.query)))
        with self.server.lock:
            return route(self.server.device, **given) or DONE

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class PhoneHttpServer(ThreadingHTTPServer):
    """Serves `device` at host and port; a port of 0 is any free one."""

    daemon_threads = True

    def __init__(self, device: PhoneDevice, host: str, port: int) -> None:
        super().__init__((host, port), PhoneHandler)
        self.device = device
        self.routes = dict(ROUTES)
        self.lock = threading.Lock()


def _object(body: bytes) -> Answer:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise WrongRequest(422, "the body must be a JSON object")
    return found


def _parameters(route: Callable[..., Answer | None], given: dict[str, str]) -> Answer:
    """Return the arguments of a route from its query. Raise WrongRequest."""
    found: Answer = {}
    for name, parameter in list(inspect.signature(route).parameters.items())[1:]:
        if name in given:
            found[name] = _value(name, given[name], str(parameter.annotation))
        elif parameter.default is parameter.empty:
            raise WrongRequest(422, f"{name} is missing")
    return found


def _value(name: str, text: str, kind: str) -> bool | int | str:
    if kind == "bool":
        return text.lower() in TRUE
    if kind != "int":
        return text
    try:
        return int(text)
    except ValueError:
        raise WrongRequest(422, f"{name} must be a whole number, not {text!r:.60}") from None


def _smaller(pixels: Any, max_side: int) -> Any:
    """Return the picture with both sides divided by the least whole number that makes them fit."""
    factor = max(1, -(-max(pixels.shape[:2]) // max(1, max_side)))
    height, width = (side // factor for side in pixels.shape[:2])
    cut = pixels[: height * factor, : width * factor, :3].reshape(height, factor, width, factor, 3)
    return cut.mean(axis=(1, 3)).round().astype("uint8")


def _png(pixels: Any) -> bytes:
    """Encode pixels of shape (height, width, 3) in the simplest form of PNG (RFC 2083)."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    framed = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def connect(console_port: int, grpc_port: int, adb_path: str, emulator_setup: bool = False) -> Any:
    """Return the library's environment of a running emulator."""
    from android_world.env import env_launcher

    return env_launcher.load_and_setup_env(
        console_port=console_port,
        emulator_setup=emulator_setup,
        freeze_datetime=True,
        adb_path=adb_path,
        grpc_port=grpc_port,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve one emulated phone with AndroidWorld's tasks.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--console-port", type=int, default=5554, help="console port of the emulator")
    parser.add_argument("--grpc-port", type=int, default=8554, help="gRPC port of the emulator")
    parser.add_argument("--adb-path", default="adb", help="the program adb")
    parser.add_argument(
        "--emulator-setup", action="store_true", help="install the tasks' apps first: once per emulator"
    )
    given = parser.parse_args()
    env = connect(given.console_port, given.grpc_port, given.adb_path, given.emulator_setup)
    PhoneHttpServer(PhoneDevice(env), given.host, given.port).serve_forever()


if __name__ == "__main__":
    main()
