"""A store's configuration: defaults, and errors that name the variable."""

from __future__ import annotations

import json

import pytest

from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.contract.names import Env, StoreClients
from elasticjob._runtime.store_pod.config import StoreConfig

VALID = {
    Env.RUN_ID: "run",
    Env.NODE_KEY: "aa" * 32,
    Env.OPERATOR_KEY: "bb" * 32,
    Env.SETTINGS: json.dumps({"min_nodes": 2, "max_nodes": 4, "target": 3}),
}


def test_defaults_of_the_store_configuration() -> None:
    config = StoreConfig.from_environ(VALID)
    assert (config.attempt, config.incarnation, config.port) == (1, 0, 29400)
    assert config.settings == RoundSettings(2, 4, 3)
    assert config.clients is StoreClients.NONE
    assert StoreConfig.from_environ(VALID | {Env.STORE_CLIENTS: "nodes"}).clients is StoreClients.NODES


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({Env.RUN_ID: ""}, "ELASTICJOB_RUN_ID is not set"),
        ({Env.STORE_CLIENTS: "all"}, "ELASTICJOB_STORE_CLIENTS must be one of none, nodes, any, not 'all'"),
        ({Env.PORT: "x"}, "ELASTICJOB_PORT must be a whole number, not 'x'"),
        ({Env.NODE_KEY: "zz"}, "ELASTICJOB_NODE_KEY must be set, in hexadecimal"),
        ({Env.OPERATOR_KEY: "bb"}, "ELASTICJOB_OPERATOR_KEY must have at least 16 bytes"),
        ({Env.SETTINGS: "{}"}, "ELASTICJOB_SETTINGS.min_nodes: missing"),
        ({Env.SETTINGS: '{"min_nodes":0,"max_nodes":1,"target":1}'}, "must be at least 1"),
    ],
)
def test_an_invalid_variable_is_named(change: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        StoreConfig.from_environ(VALID | change)
