"""A small base image for Docker, made of programs of this machine: nothing is pulled.

python -m tests.support.deploy.docker_base [NAME]
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile

BASE = "opentinker-test:base"
PROGRAMS = (
    "awk", "bash", "cat", "chmod", "chown", "cmp", "cp", "cut", "date", "env", "find", "grep", "head", "id", "ls",
    "mkdir", "mv", "rm", "sed", "seq", "sh", "sleep", "sort", "tac", "tail", "touch", "tr", "true", "uniq", "wc",
)  # fmt: skip
FILES = {"etc/passwd": b"root:x:0:0:root:/root:/bin/bash\n", "etc/group": b"root:x:0:\n"}
DIRECTORIES = ("root", "run", "srv", "tmp", "var")


def has_engine() -> bool:
    return (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
    )


def make(name: str = BASE) -> str:
    """Import the image, unless it is there, and return its name."""
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode:
        subprocess.run(["docker", "import", "-", name], input=_tar(), capture_output=True, check=True)
    return name


def _tar() -> bytes:
    found = {program: shutil.which(program) for program in PROGRAMS}
    places = {f"usr/bin/{program}": os.path.realpath(path) for program, path in found.items() if path}
    told = subprocess.run(["ldd", *places.values()], capture_output=True, text=True, check=False).stdout
    libraries = {path.lstrip("/"): os.path.realpath(path) for path in re.findall(r"(/\S+\.so\S*)", told)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
        for name in DIRECTORIES:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(info)
        link = tarfile.TarInfo("bin")
        link.type, link.linkname = tarfile.SYMTYPE, "usr/bin"
        tar.addfile(link)
        for name, data in FILES.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for name, source in {**places, **libraries}.items():
            tar.add(source, name)
    return packed.getvalue()


if __name__ == "__main__":
    print(make(*sys.argv[1:2]))
