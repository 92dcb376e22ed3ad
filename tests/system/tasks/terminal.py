"""A terminal: commands run in sequence in the same shell."""

import subprocess
from pathlib import Path
from typing import Self

_END = "=== end of the commands: "
_CURL = 'curl() { command curl --silent --show-error --fail-with-body --max-time 300 "$@"; }\n'


class Terminal:
    """Variables and functions last between commands. ``curl`` fails if the server answers with an
    error."""

    def __init__(self, directory: Path, variables: dict[str, str]) -> None:
        self._shell = subprocess.Popen(
            ["bash", "-u"],
            cwd=directory,
            env=variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.run(_CURL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.kill()
        self._shell.communicate()

    def run(self, commands: str) -> str:
        """The output of the commands, the last of which must succeed."""
        output, status = self.outcome(commands)
        assert status == 0, f"{commands}\n{output}"
        return output

    def outcome(self, commands: str) -> tuple[str, int]:
        """The output of the commands, and the exit status of the last."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        # The commands must not read the commands that follow on the shell's standard input.
        self._shell.stdin.write(f"{{ {commands}\n}} </dev/null; echo; echo '{_END}'$?\n")
        self._shell.stdin.flush()
        output = ""
        for line in self._shell.stdout:
            if line.startswith(_END):
                return output, int(line.removeprefix(_END))
            output += line
        raise AssertionError(f"the shell ended:\n{commands}\n{output}")
