"""An S3 server in a process of its own, whose objects are in its memory."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from tests.support.deployment.processes import NO_TLS, START_TIMEOUT_S, free_port

BUCKET = "warren"


@contextmanager
def running_s3() -> Iterator[dict[str, str]]:
    """Run a server with a bucket; returns the variables with which its clients find it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", f"-p{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _create_bucket(server, url)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


def _create_bucket(server: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(verify=NO_TLS) as client:
        while time.monotonic() < deadline:
            assert server.poll() is None, "the S3 server died at its start"
            with suppress(httpx.TransportError):
                client.put(f"{url}/{BUCKET}").raise_for_status()
                return
            time.sleep(0.05)
    raise AssertionError("the S3 server does not start")
