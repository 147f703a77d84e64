"""The secret is never shown; files of trust are refused with one sentence; a configuration carries it only when asked to."""

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config import ClusterConfig, RouterConfig, TlsConfig, TrustConfig, WorkerConfig, transfer_of
from tandem.config_json import dump, load
from tandem.errors import ConfigError
from tandem.secret import Secret
from tandem.trust import Certificates, Trust, read_secret
from tests.certificates import Authority

HIDDEN = "correct horse battery staple"
TRUSTED = WorkerConfig(trust=TrustConfig(Secret(HIDDEN)))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls") / "ca")


@pytest.mark.parametrize("show", [repr, str, "{}".format, "%s".__mod__, dump], ids=["repr", "str", "format", "percent", "dump"])
def test_no_text_made_of_a_configuration_shows_the_secret(show: object) -> None:
    for config in (
        TRUSTED,
        RouterConfig(trust=TRUSTED.trust),
        ClusterConfig(worker=TRUSTED, trust=TRUSTED.trust),
        copy.deepcopy(TRUSTED),
    ):
        assert HIDDEN not in show(config)  # type: ignore[operator]


def test_a_log_record_and_an_error_do_not_show_it(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("test").error("configuration %s of %r", TRUSTED, Trust(Secret(HIDDEN)))
    with pytest.raises(ConfigError) as refused:
        load(WorkerConfig, json.dumps({"trust": {"secret": [HIDDEN]}}))
    assert HIDDEN not in caplog.text + str(refused.value)


def test_another_process_gets_it_when_the_sender_says_so() -> None:
    assert load(WorkerConfig, dump(TRUSTED, with_secrets=True)) == TRUSTED
    assert load(WorkerConfig, dump(TRUSTED)).trust.secret == Secret()


def test_secrets_are_equal_by_value_and_made_ones_are_not() -> None:
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret.make() != Secret.make()
    assert len(Secret.make().reveal()) == 64
    assert not Secret()


def test_without_a_secret_nothing_starts() -> None:
    with pytest.raises(ConfigError, match="no cluster secret was given"):
        Trust.load(TrustConfig())


def test_a_secret_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(HIDDEN + "\n")
    assert Trust.load(TrustConfig(secret_file=str(file))).secret == Secret(HIDDEN)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "no such file"), (b"short", "too short"), (b"\xff" * 40, "cannot read")], ids=str
)
def test_a_secret_file_that_cannot_be_used_is_named_and_not_quoted(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as refused:
        read_secret(str(file))
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "short\n" not in str(refused.value)


def test_certificates_are_read_once_at_start_and_their_key_is_not_shown(authority: Authority) -> None:
    tls = authority.issue("worker")
    certificates = Certificates.load(tls)
    assert certificates is not None
    assert certificates.cert == Path(tls.cert_file).read_bytes()
    assert b"PRIVATE KEY" in certificates.key
    assert "PRIVATE KEY" not in repr(Trust(Secret(HIDDEN), certificates))
    assert Certificates.load(TlsConfig()) is None


def test_files_of_tls_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    tls, other = authority.issue("one"), authority.issue("two")
    (tmp_path / "text").write_text("no certificate")
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for wrong, reason in (
        (replace(tls, cert_file="/does/not/exist"), "/does/not/exist: no such file"),
        (replace(tls, cert_file=str(tmp_path / "text")), "is no PEM file"),
        (replace(tls, key_file=other.key_file), "cannot be used together: key values mismatch"),
        (replace(tls, ca_file=str(tmp_path / "broken")), "holds no usable certificate"),
        (replace(tls, key_file=""), "give both cert_file and key_file"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            Certificates.load(wrong)
        assert "\n" not in str(refused.value)


def test_tls_between_processes_must_be_mutual(authority: Authority) -> None:
    tls = replace(authority.issue("worker"), ca_file="")
    with pytest.raises(ConfigError, match="is mutual"):
        Trust.load(TrustConfig(Secret(HIDDEN), tls=tls))


def test_a_worker_that_keeps_to_this_machine_opens_no_other_devices_ports() -> None:
    assert transfer_of(WorkerConfig()).net_devices == "lo"
    assert transfer_of(WorkerConfig(host="::1")).net_devices == "lo"
    assert transfer_of(WorkerConfig(host="10.0.0.7")).net_devices == ""
    chosen = replace(WorkerConfig().transfer, net_devices="mlx5_0:1")
    assert transfer_of(WorkerConfig(transfer=chosen)).net_devices == "mlx5_0:1"
