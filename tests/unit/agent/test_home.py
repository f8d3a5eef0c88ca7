"""HOME and USER of workers whose user has no home directory and no name."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from elasticjob._runtime.agent.folders import NodeFolders
from elasticjob._runtime.agent.start_workers.home import home_variables

SHELL = {"USER": "me"}


def test_a_home_directory_stays_even_if_it_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert home_variables({"HOME": str(tmp_path), **SHELL}, "/none") == {}


@pytest.mark.parametrize("home", [None, "", "/no/such/folder"])
def test_a_missing_home_directory_is_made(home: str | None, tmp_path: Path) -> None:
    env = SHELL if home is None else {"HOME": home, **SHELL}
    for _ in range(2):
        made = home_variables(env, str(tmp_path))["HOME"]
        assert Path(made).parent == tmp_path
        assert Path(made).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("writable", [True, False])
def test_the_root_folder_is_a_home_directory_only_for_a_user_who_may_write_it(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    assert ("HOME" in home_variables({"HOME": "/", **SHELL}, str(tmp_path))) is not writable


def test_a_user_without_a_name_is_called_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"HOME": str(tmp_path)}
    assert "USER" not in home_variables(env, "/none"), "the user of this test has a name"

    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert home_variables(env, "/none") == {"USER": str(os.getuid())}
    assert home_variables(env | {"LOGNAME": "me"}, "/none") == {}


@pytest.mark.parametrize(
    ("temporary", "parent"),
    [("/x", "/x"), (None, "/scratch"), ("/data/run", "/scratch")],
    ids=["a temporary folder", "none", "the working directory"],
)
def test_a_home_directory_is_not_made_in_the_working_directory(temporary: str | None, parent: str) -> None:
    assert NodeFolders("/scratch", temporary, "/data/run").home_parent == parent
