"""A store's configuration: what is missing or wrong is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticjob.contract.messages import RoundSettings
from elasticjob.contract.names import Env
from elasticjob.store_pod.main import StoreConfig, count_container_start

GOOD = {
    Env.RUN_ID: "run",
    Env.NODE_KEY: "aa" * 32,
    Env.OPERATOR_KEY: "bb" * 32,
    Env.SETTINGS: json.dumps({"min_nodes": 2, "max_nodes": 4, "target": 3}),
}


def test_defaults() -> None:
    config = StoreConfig.from_environ(GOOD)
    assert (config.attempt, config.incarnation, config.port) == (1, 0, 29400)
    assert config.settings == RoundSettings(2, 4, 3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({Env.RUN_ID: ""}, "ELASTICJOB_RUN_ID is not set"),
        ({Env.PORT: "x"}, "ELASTICJOB_PORT must be a whole number, not 'x'"),
        ({Env.NODE_KEY: "zz"}, "ELASTICJOB_NODE_KEY must be set, in hexadecimal"),
        ({Env.OPERATOR_KEY: "bb"}, "ELASTICJOB_OPERATOR_KEY must have at least 16 bytes"),
        ({Env.SETTINGS: "{}"}, "ELASTICJOB_SETTINGS.min_nodes: missing"),
        ({Env.SETTINGS: '{"min_nodes":0,"max_nodes":1,"target":1}'}, "must be at least 1"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        StoreConfig.from_environ(GOOD | change)


def test_starts_are_counted_where_a_folder_outlives_the_container(tmp_path: Path) -> None:
    assert [count_container_start(tmp_path), count_container_start(tmp_path), count_container_start(None)] == [0, 1, 0]
