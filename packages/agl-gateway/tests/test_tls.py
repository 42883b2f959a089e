"""A gateway with a certificate of an authority that the test makes."""

import asyncio
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from agl.errors import ConfigError
from agl_gateway.tls import Certificate


def write(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    """A new certificate for this machine, and its key."""
    made = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made.private_key_pem.write_to_path(key)
    cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
    return cert, key


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    made = trustme.CA()
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    return made


async def serial(port: int, authority: trustme.CA) -> int:
    """The number of the certificate that a new connection gets."""
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    found = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return int(found, 16)


def test_command_reaches_a_served_store_over_tls_if_it_trusts_the_authority(tmp_path, authority):
    cert, key = write(authority, tmp_path)
    environment = {**os.environ, "AGL_TOKEN": "a-token-of-the-tests-0123456789", "XDG_STATE_HOME": str(tmp_path)}
    agl = [sys.executable, "-m", "agl"]
    serving = subprocess.Popen(
        [*agl, "serve", "--store", "served.db", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        found = re.search(r"https://127\.0\.0\.1:\d+", serving.stdout.readline())
        assert found is not None

        def listed(**trust: str) -> subprocess.CompletedProcess[str]:
            command = [*agl, "doctor", found[0], "--json"]
            return subprocess.run(command, env={**environment, **trust}, cwd=tmp_path, capture_output=True, text=True)

        trusted = listed(SSL_CERT_FILE=str(tmp_path / "ca.pem"))
        assert "answers in" in trusted.stdout, trusted.stderr
        assert "writes to the store" in trusted.stdout
        assert "certificate is not trusted here" in listed().stdout
    finally:
        serving.kill()
        serving.communicate()


async def test_renewed_certificate_serves_new_connections_without_a_restart(serving, tmp_path, authority):
    certificate = Certificate(*write(authority, tmp_path))
    async with serving(certificate=certificate) as it:
        port = urlsplit(it.url).port
        assert it.url.startswith("https://")
        first = await serial(port, authority)
        certificate.look()
        assert first == await serial(port, authority)
        (tmp_path / "key.pem").write_text("not a key")
        certificate.look()
        assert first == await serial(port, authority)
        write(authority, tmp_path)
        certificate.look()
        assert first != await serial(port, authority)


def test_files_that_are_no_pair_are_refused_with_advice(tmp_path, authority):
    cert, _ = write(authority, tmp_path)
    with pytest.raises(ConfigError, match="its private key with --tls-key"):
        Certificate(cert, tmp_path / "absent.pem")
