"""Connects to the phone of a console port, which is a new one in each process."""

from android_world.env.interface import SimulatedPhone


def load_and_setup_env(
    console_port: int = 5554,
    emulator_setup: bool = False,
    freeze_datetime: bool = True,
    adb_path: str = "adb",
    grpc_port: int = 8554,
) -> SimulatedPhone:
    return SimulatedPhone(console_port)
