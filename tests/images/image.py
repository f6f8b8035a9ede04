"""A built image, and processes of it that run as a strict cluster runs them: any user, group 0, a read-only root."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.docker.build import size

USER = 1000730000  # as OpenShift gives them
# A container runtime's setup, for buildah: one file system, of which only /tmp can be written to.
BOX = """
set -e
mount --bind "$0" "$0"
mount -t tmpfs -o mode=1777 tmpfs "$0/tmp"
mount --rbind /proc "$0/proc"
mount -t tmpfs tmpfs "$0/dev"
mkdir -m 1777 "$0/dev/shm"
for device in null zero random urandom; do touch "$0/dev/$device"; mount --bind "/dev/$device" "$0/dev/$device"; done
mount --bind /etc/hosts "$0/etc/hosts"
mount -o remount,ro,bind "$0"
"""


@dataclass(frozen=True)
class Image:
    """An image in the store of `builder`; `root` is where buildah has mounted it."""

    builder: list[str]
    name: str
    root: Path | None

    def config(self) -> dict[str, Any]:
        """User, environment, command, labels and health check, as Docker names them."""
        kind = ["inspect", "--type", "image"] if self.builder[0] == "buildah" else ["image", "inspect"]
        done = subprocess.run([*self.builder, *kind, self.name], check=True, capture_output=True, text=True)
        actual = json.loads(done.stdout)
        config: dict[str, Any] = actual["Docker"]["config"] if self.builder[0] == "buildah" else actual[0]["Config"]
        return config

    def size(self) -> int:
        """In bytes, of all layers."""
        return size(self.builder, self.name)

    def start(self, *command: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Run `command`, or else the image's own, in this machine's network; the process takes signals."""
        return subprocess.Popen(
            self._command(command, env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def output(self, *command: str, env: dict[str, str] | None = None) -> str:
        """The output of `command`; raises AssertionError when it fails."""
        with self.start(*command, env=env) as process:
            printed, _ = process.communicate(timeout=250)
        assert process.returncode == 0, printed
        return printed

    def _command(self, command: tuple[str, ...], env: dict[str, str]) -> list[str]:
        if self.root is None:
            variables = [word for pair in env.items() for word in ("--env", "=".join(pair))]
            limits = ["--read-only", "--tmpfs", "/tmp", "--user", f"{USER}:0", "--cap-drop", "ALL"]
            entry = ["--entrypoint", command[0]] if command else []
            box = ["run", "--rm", "--network", "host", *limits, *variables, *entry, self.name]
            return [*self.builder, *box, *command[1:]]
        config = self.config()
        run = command or [*(config["Entrypoint"] or []), *config["Cmd"]]
        variables = [*config["Env"], *("=".join(pair) for pair in env.items())]
        script = f'{BOX}\nexec chroot --userspec={USER}:0 --groups=0 "$0" env -i "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(self.root), *variables, *run]
