"""Applications that share a database, and one whose messages are signed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from kombu import Connection

from celery_durable import Durable, ExecutionNotFound
from tests.integration.features_support import features_bench
from tests.integration.support import status, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers
from tests.nodes.workers import ROOT

# Each starts four processes.
pytestmark = pytest.mark.timeout(180)


class Neighbour:
    """Another application, with a broker of its own, on the same database."""

    def __init__(self, bench: Bench, servers: Servers) -> None:
        self._bench = bench
        self._broker = servers.redis.url(servers.redis.new_database())
        self.env = {
            "FEATURES_NAME": "neighbour",
            "CELERY_BROKER_URL": self._broker,
            # Not in the same Redis server: what is published there is heard in all of its databases.
            "CELERY_RESULT_BACKEND": f"db+{bench.store_url}",
        }
        self.app = Celery("neighbour", set_as_current=False)
        self.app.conf.task_default_queue = "neighbour"
        self.durable = Durable(self.app)

    def send(self, task: Any, *args: Any, task_id: str) -> None:
        # By a connection of its own: this process's environment says where the other one's broker is.
        with Connection(self._broker) as connection:
            self.app.send_task(task.name, args, task_id=task_id, connection=connection)

    def wait_for_status(self, task_id: str, wanted: str) -> None:
        def is_there() -> bool:
            return [e.status for e in self.durable.list() if e.task_id == task_id] == [wanted]

        self._bench.wait_for(is_there, message=f"the neighbour's {task_id} is {wanted}")


@pytest.fixture(scope="module")
def bench(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with features_bench("redis-postgres", servers, tmp_path_factory.mktemp("apps")) as bench:
        yield bench


def test_two_applications_on_one_database_do_not_see_each_other(bench: Bench, servers: Servers) -> None:
    neighbour = Neighbour(bench, servers)
    bench.worker(name="neighbour", env=neighbour.env)
    t, durable = bench.project, bench.app().durable
    mine = t.nap.apply_async((1, 600), task_id="the same")
    neighbour.send(t.nap, 2, 600, task_id="the same")
    neighbour.send(t.nap, 3, 1.1, task_id="theirs")
    wait_until_asleep(bench, mine)
    neighbour.wait_for_status("the same", "sleeping")
    neighbour.wait_for_status("theirs", "sleeping")
    later = t.nap.apply_async((4, 1.5), task_id="mine")
    assert later.get(timeout=20) == 4

    # Our beat has been looking for what is due since before then, and theirs does not run yet.
    assert durable.get("the same").status == neighbour.durable.get("the same").status == "sleeping"
    assert neighbour.durable.get("theirs").sends == 0
    assert {e.task_id for e in durable.list()} == {"the same", "mine"}
    assert {e.task_id for e in neighbour.durable.list()} == {"the same", "theirs"}
    with pytest.raises(ExecutionNotFound):
        durable.wake("theirs")
    cancel = bench.celery("durable", "cancel", "the same", env=neighbour.env)
    assert cancel.returncode == 0, cancel.stderr
    assert status(bench, "the same") == "sleeping"

    bench.beat(name="their-beat", env=neighbour.env)
    neighbour.wait_for_status("theirs", "succeeded")
    neighbour.wait_for_status("the same", "cancelled")
    durable.wake("the same")
    assert mine.get(timeout=20) == 1
    wait_for_status(bench, "the same", "succeeded")
    assert neighbour.durable.get("the same").status == "cancelled"
    neighbour.app.close()


def test_a_signed_message_keeps_its_signature_through_a_sleep(
    servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("signed")
    write_certificate(folder)
    env = {"FEATURES_SECURITY": str(folder)}
    with features_bench("redis-postgres", servers, folder, env=env) as bench:
        client = subprocess.run(
            [sys.executable, "-m", "tests.integration.signed_client"],
            env={**bench.env, "PYTHONPATH": str(ROOT)},
            cwd=bench.folder,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert client.returncode == 0, client.stderr + bench.report()
        seen = json.loads(client.stdout.splitlines()[-1])
        assert seen["value"] == 42
        assert seen["asleep"]["type"] == "application/data"
        assert seen["ended"] == seen["asleep"]
        assert bench.witness.count(seen["id"], "body") == 2


def write_certificate(folder: Path) -> None:
    """A key, and a certificate that it has signed itself."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "features")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    (folder / "certificate.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
