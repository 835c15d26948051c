"""That ranks which do not have one run folder find out before they train."""

import os
from pathlib import Path

import pytest

from mmtrain.checkpoint.shared_folder import check_shared
from mmtrain.errors import ConfigError
from tests.ranks import run_ranks


def message_of(rank: int, folders: list[Path], read_only: bool = False) -> str:
    if rank and read_only:  # root may write anywhere
        os.access = lambda path, mode: False
    try:
        check_shared(folders[rank])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_folder_that_ranks_do_not_share_is_refused_on_all(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    for folders in ([one, other], [one, tmp_path]):
        first, second = run_ranks(message_of, 2, folders)
        assert first == second
        assert f"job.dump_folder = '{one}' (" in first
        assert f"rank 1 ({os.uname().nodename}) does not see what rank 0 writes in '{folders[1]}'" in first
    assert "rank 1" in run_ranks(message_of, 2, [one, one], True)[0]
    assert run_ranks(message_of, 2, [one, one]) == ["", ""]
    assert list(one.iterdir()) == []
