"""What `up` refuses before anything is started, and the configuration that it makes."""

import argparse
import json
import shutil
import socket
from concurrent import futures
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.cli.up import add_parser, check_model, chosen_ports, cluster_config, settle_trust
from tandem.config import ClusterConfig, DecodeConfig, ModelSource, RouterConfig, TlsConfig, TrustConfig, WorkerConfig
from tandem.config_json import load
from tandem.errors import CheckpointError, ConfigError, TandemError
from tandem.secret import Secret


def ports(**router: Any) -> AbstractContextManager[ClusterConfig]:
    return chosen_ports(ClusterConfig(router=RouterConfig(**router)))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["up", *words])


def test_without_options_it_is_the_default_cluster() -> None:
    assert cluster_config(parse()) == ClusterConfig()


def test_every_option_reaches_its_place() -> None:
    config = cluster_config(
        parse(
            *(
                "--model",
                "owner/name",
                "--prefill",
                "2",
                "--decode",
                "3",
                "--host",
                "::1",
                "--grpc-port",
                "1",
                "--http-port",
                "2",
            ),
            *("--dtype", "float32", "--max-context-tokens", "99", "--memory-gib", "0.5", "--chunk-tokens", "7"),
            *("--block-size-tokens", "16"),
        )
    )
    assert config.worker.model == ModelSource("owner/name", "float32", 99)
    assert (config.prefill, config.decode) == (2, 3)
    assert (config.router.host, config.router.grpc_port, config.router.http_port) == ("::1", 1, 2)
    assert (config.worker.cache.budget_bytes, config.worker.cache.block_size_tokens) == (512 * 1024**2, 16)
    assert config.worker.prefill.chunk_tokens == 7


def test_every_process_gets_the_same_collector_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settle_trust(cluster_config(parse("--otlp-endpoint", "http://127.0.0.1:4317")))
    assert {place.tracing.otlp_endpoint for place in (config, config.worker, config.router)} == {"http://127.0.0.1:4317"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install tandem\[tracing\]"):
        settle_trust(cluster_config(parse("--otlp-endpoint", "http://127.0.0.1:4317")))


def test_options_override_the_file_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"prefill": 4, "decode": 5, "router": {"max_queue": 9, "grpc_port": 1234}}))
    config = cluster_config(parse("--config", str(file), "--decode", "6", "--grpc-port", "4321"))
    assert (config.prefill, config.decode, config.router.max_queue, config.router.grpc_port) == (4, 6, 9, 4321)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--prefill", "0"), "--prefill"),
        (("--decode", "-1"), "--decode"),
        (("--decode", "3", "--max-decode", "2"), "--max-decode"),
        (("--max-prefill", "-1"), "--max-prefill"),
        (("--grpc-port", "70000"), "--grpc-port"),
        (("--memory-gib", "0"), "--memory-gib"),
        (("--memory-gib", "nan"), "--memory-gib"),
        (("--prefix-cache-gib", "-1"), "--prefix-cache-gib"),
        (("--prefix-cache-gib", "nan"), "--prefix-cache-gib"),
        (("--chunk-tokens", "0"), "--chunk-tokens"),
        (("--otlp-endpoint", "collector:4317"), "tracing.otlp_endpoint: 'collector:4317'"),
        (("--config", "/does/not/exist.json"), "/does/not/exist.json"),
    ],
)
def test_a_number_or_file_that_cannot_be_used_is_named(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        cluster_config(parse(*words))


def test_a_local_cluster_has_room_to_grow_and_always_for_what_it_starts() -> None:
    assert cluster_config(parse()).units == {"prefill": 4, "decode": 4}
    assert cluster_config(parse("--prefill", "6", "--max-decode", "1")).units == {"prefill": 6, "decode": 1}


def test_a_port_in_use_is_refused_with_the_option_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(TandemError, match=r"in use.*--grpc-port"), ports(grpc_port=port, http_port=0):
            pass
        with pytest.raises(TandemError, match=r"in use.*--http-port"), ports(grpc_port=0, http_port=port):
            pass


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(TandemError, match=r"cannot listen on 192\.0\.2\.77"), ports(host="192.0.2.77"):
        pass


def test_port_0_becomes_a_real_port_before_the_router_starts() -> None:
    with ports(grpc_port=0, http_port=0) as config:
        assert config.router.grpc_port > 0
        assert config.router.http_port not in (0, config.router.grpc_port)


def test_a_chosen_port_is_kept_for_the_router() -> None:
    with ports(grpc_port=0, http_port=0) as config:
        for port in (config.router.grpc_port, config.router.http_port):
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)):
                pass  # which reuses the address, as the router does
        server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        assert server.add_insecure_port(f"127.0.0.1:{config.router.grpc_port}") == config.router.grpc_port
        server.stop(None)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "nothing", "a/b/c"])
def test_what_is_neither_folder_nor_hub_id_is_refused_at_once(path: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        check_model(ClusterConfig(worker=WorkerConfig(model=ModelSource(path))))


def test_a_folder_without_a_config_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_model(ClusterConfig(worker=WorkerConfig(model=ModelSource(str(tmp_path)))))


def test_the_embedded_model_and_a_hub_id_pass() -> None:
    for path in ("", "owner/name"):
        config = ClusterConfig(worker=WorkerConfig(model=ModelSource(path)))
        assert check_model(config) == config


# ---- trust ----


def test_every_process_of_a_cluster_gets_the_same_secret_and_two_clusters_do_not() -> None:
    config = settle_trust(ClusterConfig())
    assert config.worker.trust == config.router.trust == config.trust
    assert len(config.trust.secret.reveal()) == 64
    assert config.trust.secret != settle_trust(ClusterConfig()).trust.secret


def test_a_secret_file_is_read_here_and_not_looked_for_on_other_nodes(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    config = settle_trust(cluster_config(parse("--cluster-secret-file", str(file))))
    assert config.worker.trust == TrustConfig(Secret("0123456789abcdef"))


@pytest.mark.parametrize(
    "config",
    [
        ClusterConfig(trust=TrustConfig(Secret("in plain sight, for all"))),
        ClusterConfig(worker=WorkerConfig(trust=TrustConfig(secret_file="a"))),
        ClusterConfig(router=RouterConfig(trust=TrustConfig(secret_file="a"))),
    ],
)
def test_trust_is_set_in_one_place_and_a_secret_only_by_a_file(config: ClusterConfig) -> None:
    with pytest.raises(ConfigError, match="top-level `trust`"):
        settle_trust(config)


def test_certificates_that_cannot_be_used_are_refused_before_anything_starts() -> None:
    tls = TlsConfig(cert_file="/no/such/cert.pem", key_file="/no/such/key.pem", ca_file="/no/such/ca.pem")
    for config in (ClusterConfig(trust=TrustConfig(tls=tls)), ClusterConfig(router=RouterConfig(tls=tls))):
        with pytest.raises(ConfigError, match=r"/no/such/cert\.pem: no such file"):
            settle_trust(config)


def test_a_truncated_shard_is_found_before_anything_starts(tmp_path: Path) -> None:
    from tandem.model.embedded import embedded_checkpoint

    folder = tmp_path / "model"
    shutil.copytree(embedded_checkpoint(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*truncated"):
        check_model(cluster_config(parse("--model", str(folder))))


def test_a_changed_embedded_model_is_found_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.model.embedded import embedded_checkpoint

    folder = tmp_path / "model"
    shutil.copytree(embedded_checkpoint(), folder)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("tandem.model.embedded._FOLDER", folder)
    with pytest.raises(CheckpointError, match=r"config\.json is not the file that tandem shipped"):
        check_model(cluster_config(parse()))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    from tandem.model.embedded import embedded_checkpoint

    folder = tmp_path / "model"
    shutil.copytree(embedded_checkpoint(), folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        check_model(cluster_config(parse("--model", str(folder))))


def test_one_port_cannot_be_both() -> None:
    with pytest.raises(ConfigError, match="are both 45671"), ports(grpc_port=45671, http_port=45671):
        pass


def test_a_limit_that_no_message_could_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode\.local_prefill_tokens: 3e\+09 is not between 0 and"):
        DecodeConfig(local_prefill_tokens=3_000_000_000)


def test_a_number_that_is_out_of_range_is_told_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"^it\.json\.worker\.decode: decode\.batch_share: 2 is not between 0 and 1"):
        load(ClusterConfig, '{"worker": {"decode": {"batch_share": 2.0}}}', "it.json")
